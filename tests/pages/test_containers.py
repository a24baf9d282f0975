"""docs/containers: image and job of Kubernetes fit together, and torchrun starts them.

The section about containers in 06_slurm/first_gpu_job.ipynb leads to these files.
"""

import json
import re
import shlex

import pytest
import yaml
from torch.distributed.run import get_args_parser

from harness import commands
from harness.stages import ROOT

pytestmark = pytest.mark.ci
FOLDER = ROOT / "docs/containers"
DOCKERFILE = (FOLDER / "Dockerfile").read_text()
SERVICE, JOB = yaml.safe_load_all((FOLDER / "job.yaml").read_text())
CLAIM = yaml.safe_load((FOLDER / "checkpoints.yaml").read_text())
POD = JOB["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]
WORDS = shlex.split(
    CONTAINER["args"][0].replace("`expr $JOB_COMPLETION_INDEX = 0`", "1")
)


def test_the_names_in_the_manifests_fit_together():
    name = JOB["metadata"]["name"]
    assert SERVICE["spec"]["selector"] == {"job-name": name}
    assert POD["subdomain"] == SERVICE["metadata"]["name"]
    assert f"--rdzv-endpoint={name}-0.{POD['subdomain']}:29500" in WORDS
    volumes = {volume["name"]: volume for volume in POD["volumes"]}
    mounts = {each["mountPath"]: each["name"] for each in CONTAINER["volumeMounts"]}
    shared = volumes[mounts["/checkpoints"]]["persistentVolumeClaim"]["claimName"]
    assert shared == CLAIM["metadata"]["name"]
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    assert f"--tag {CONTAINER['image']} " in DOCKERFILE
    uid = re.search(r"--uid (\d+)", DOCKERFILE)[1]
    assert f"\nUSER {uid}\n" in DOCKERFILE
    assert POD["securityContext"]["fsGroup"] == int(uid)
    variables = {each["name"]: each["value"] for each in CONTAINER["env"]}
    seconds = int(variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
    assert 30 < seconds < POD["terminationGracePeriodSeconds"]


@pytest.mark.release
def test_torchrun_is_process_1_and_understands_its_command():
    assert CONTAINER["command"] == ["sh", "-c"] and WORDS[:2] == ["exec", "torchrun"]
    args = get_args_parser().parse_args(WORDS[2:])
    assert int(args.nnodes) == JOB["spec"]["completions"] == JOB["spec"]["parallelism"]
    gpus = CONTAINER["resources"]["limits"]["nvidia.com/gpu"]
    assert int(args.nproc_per_node) == gpus and args.rdzv_backend == "c10d"
    assert "--checkpoint-dir=/checkpoints" in args.training_script_args
    commands.run(["python", args.training_script, *args.training_script_args, "--help"])


def test_the_image_copies_what_exists_and_starts_torchrun():
    program, *words = json.loads(re.search(r"^CMD (.*)$", DOCKERFILE, re.MULTILINE)[1])
    copied = re.findall(r"^COPY (.+) \S+$", DOCKERFILE, re.MULTILINE)
    names = [name for line in copied for name in line.split()]
    assert all((ROOT / name).exists() for name in names)
    script = get_args_parser().parse_args(words).training_script
    assert program == "torchrun" and script in names
