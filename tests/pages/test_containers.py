"""docs/containers.md is true: its files are valid, and its command starts and stops.

The pods are the two network namespaces of tools/two_machines.sh. Each runs the command
of job.yaml; the script and the number of processes are replaced by what a CPU can do.
"""

import contextlib
import inspect
import json
import os
import re
import shlex
import signal
import sys
import textwrap
from pathlib import Path

import kubernetes_validate
import psutil
import pytest
import yaml
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import get_args_parser

from harness import commands
from harness.stages import ROOT
from tests.conftest import only_in_release
from tests.training import missing_for_two_machines

pytestmark = [pytest.mark.ci, pytest.mark.slow]
FOLDER = ROOT / "docs/containers"
PAGE = (ROOT / "docs/containers.md").read_text()
DOCKERFILE = (FOLDER / "Dockerfile").read_text()
MACHINES = ROOT / "tools/two_machines.sh"
PAIR = f"containers-{os.getpid()}-"
MEET = "06_slurm/demos/meet.py"
LONG = "train-{}.train.default.svc.cluster.local"  # a pod's name by its number
UNKNOWN = "cannot be retrieved (gai error"  # torch's words for a name without address
# Trains the short script of stage 10. In step 36, the pod with the variable WAITS waits
# for a signal. A training that resumes has fewer steps left.
WAIT_IN_STEP_36 = """
import os, runpy, signal, sys, time
from torch.optim.optimizer import register_optimizer_step_post_hook

steps = []

def after_step(*_):
    steps.append(1)
    if len(steps) == 36 and "WAITS" in os.environ:
        record, received = signal.getsignal(signal.SIGTERM), []
        signal.signal(signal.SIGTERM, lambda *event: received.append(event))
        print("waits for a signal", flush=True)
        while not received:
            time.sleep(0.05)
        record(*received[0])

register_optimizer_step_post_hook(after_step)
sys.argv.insert(1, "--checkpoint-dir")
runpy.run_path("10_preemption/demos/stop_in_time.py", run_name="__main__")
"""


def documents(name):
    return [*yaml.safe_load_all((FOLDER / name).read_text())]


@pytest.fixture(scope="module")
def job():
    """The Job of job.yaml."""
    return documents("job.yaml")[1]


@pytest.fixture(scope="module")
def pod(job):
    return job["spec"]["template"]["spec"]


@pytest.fixture(scope="module")
def command(pod):
    """The command of job.yaml, a line for a shell."""
    (container,) = pod["containers"]
    assert container["command"] == ["sh", "-c"]
    (line,) = container["args"]
    return line


# ---- the files -----------------------------------------------------------------------
@pytest.mark.parametrize("version", ["1.31", "1.37"])
@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda p: p.name)
def test_a_manifest_follows_the_schemas_of_kubernetes(path, version):
    """From the version in which podFailurePolicy became stable to the latest one."""
    for document in documents(path.name):
        kubernetes_validate.validate(document, version, strict=True)


def assert_names_fit(service, job):
    """The pods of a Job have the names that its command and its Service use."""
    name, pod = job["metadata"]["name"], job["spec"]["template"]["spec"]
    assert service["spec"]["selector"] == {"job-name": name}
    assert pod["subdomain"] == service["metadata"]["name"]
    (line,) = pod["containers"][0]["args"]
    assert f"--rdzv-endpoint={name}-0.{pod['subdomain']}:" in line


def test_the_names_in_the_manifests_fit_together(job, pod):
    service, (claim,) = documents("job.yaml")[0], documents("checkpoints.yaml")
    assert_names_fit(service, job)
    (container,) = pod["containers"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
    shared = volumes[mounts["/checkpoints"]]["persistentVolumeClaim"]["claimName"]
    assert shared == claim["metadata"]["name"]
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    assert f"--tag {container['image']} " in DOCKERFILE
    uid = re.search(r"--uid (\d+)", DOCKERFILE)[1]
    # a name would fail where a policy requires runAsNonRoot
    assert re.search(r"^USER (\S+)$", DOCKERFILE, re.MULTILINE)[1] == uid
    assert pod["securityContext"]["fsGroup"] == int(uid)


def test_the_page_quotes_the_manifest(job):
    text = (FOLDER / "job.yaml").read_text()
    command = textwrap.dedent(re.search(r">-\n((?: {14}.*\n)+)", text)[1])
    assert f"```\n{command}```\n" in PAGE
    ready, name = job["spec"]["parallelism"], job["metadata"]["name"]
    assert f"'{{.status.ready}}'={ready} job/{name} " in PAGE
    streams = re.search(r"--max-log-requests=(\d+)", PAGE)[1]
    assert int(streams) > job["spec"]["backoffLimit"] + ready


def test_torchrun_understands_the_command(job, pod, command):
    words = shlex.split(command.replace("`expr $JOB_COMPLETION_INDEX = 0`", "1"))
    assert words[:2] == ["exec", "torchrun"]
    args = get_args_parser().parse_args(words[2:])
    assert int(args.nnodes) == job["spec"]["completions"] == job["spec"]["parallelism"]
    (container,) = pod["containers"]
    assert (
        int(args.nproc_per_node) == container["resources"]["limits"]["nvidia.com/gpu"]
    )
    assert args.rdzv_backend == "c10d"
    assert (ROOT / args.training_script).is_file()
    assert "--checkpoint-dir=/checkpoints" in args.training_script_args
    commands.run(["python", *words[words.index(args.training_script) :], "--help"])


def test_torchrun_kills_its_ranks_before_kubernetes_kills_torchrun(pod):
    (container,) = pod["containers"]
    variables = {each["name"]: each["value"] for each in container["env"]}
    if "shutdown_timeout" not in inspect.signature(LaunchConfig).parameters:
        pytest.skip("this torchrun gives its ranks 30 s, whatever the variable says")
    config = "LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=1)"
    asked = "from torch.distributed.launcher.api import LaunchConfig; "
    asked += f"print({config}.shutdown_timeout)"
    seconds = int(commands.run(["python", "-c", asked], **variables).stdout)
    assert 30 < seconds < pod["terminationGracePeriodSeconds"]


def test_the_dockerfile_copies_what_exists_and_starts_torchrun():
    copied = re.findall(r"^COPY (\S+) (\S+)$", DOCKERFILE, re.MULTILINE)
    assert len(copied) == 2
    for source, target in copied:
        assert (ROOT / source).exists()
        assert target.rstrip("/") in (".", source.rstrip("/"), str(Path(source).parent))
    program, *words = json.loads(re.search(r"^CMD (.*)$", DOCKERFILE, re.MULTILINE)[1])
    assert program == "torchrun"
    args = get_args_parser().parse_args(words)
    assert args.training_script in [source for source, _ in copied]
    commands.run(["python", args.training_script, *args.training_script_args, "--help"])


def test_the_image_has_the_packages_that_were_tested():
    """tests/around/test_tools.py holds that these are all that the script imports."""
    (names,) = re.findall(r"^COPY (requirements.*) \./$", DOCKERFILE, re.MULTILINE)
    assert all((ROOT / name).is_file() for name in names.split())
    required, lock = names.split()
    assert f"--requirement {required} --constraint {lock}\n" in DOCKERFILE


# ---- the start -----------------------------------------------------------------------
def on_one_cpu(command, *words):
    """Return the manifest's command with another script, and one process per pod."""
    line = re.sub(r"--nproc-per-node=\d+", "--nproc-per-node=1", command)
    return re.sub(r"\S+/train\.py .*", shlex.join(map(str, words)), line)


def hosts(machine):
    return Path(f"/etc/netns/{PAIR}{machine}/hosts")


class Pods:
    """Two pods: machine1 is train-0, machine2 is train-1."""

    def __init__(self, folder):
        self.folder, self.count = folder, 0
        self.call("start")
        for machine in (1, 2):  # as Kubernetes writes it: its own names, and no others
            own = f"10.0.0.{machine} {LONG.format(machine - 1)} train-{machine - 1}"
            hosts(machine).write_text(f"127.0.0.1 localhost\n{own}\n")

    def call(self, *words):
        return commands.run(["bash", MACHINES, *words], TWO_MACHINES=PAIR).stdout

    def publish(self):
        """Let the names that a Service gives be known on both, as its DNS does."""
        for machine in (1, 2):
            with hosts(machine).open("a") as file:
                for n in (0, 1):
                    file.write(f"10.0.0.{n + 1} {LONG.format(n)} train-{n}.train\n")

    def start(self, machine, line, **variables):
        """Start the pod that a machine stands for, with a command; return its Job."""
        self.count += 1
        number = machine - 1
        line = f"hostname train-{number} && exec sh -c {shlex.quote(line)}"
        words = ["bash", MACHINES, "on", machine, "sh", "-c", line]
        variables |= {"TWO_MACHINES": PAIR, "JOB_COMPLETION_INDEX": number}
        variables["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return commands.start(words, self.folder / f"job-{self.count}", **variables)

    def wait_until_it_listens(self):
        listening = ("on", 1, "ss", "-Hltn", "sport = :29500")
        commands.wait_until(lambda: self.call(*listening), commands.LIMIT)


@pytest.fixture
def pods(tmp_path):
    if missing := missing_for_two_machines():
        pytest.skip(missing)
    pods = Pods(tmp_path)
    yield pods
    pods.call("stop")


def assert_met(*jobs):
    found = [job.wait() for job in jobs]
    assert [done.returncode for done in found] == [0, 0], found
    ranks = sorted(re.findall(r"rank (\d), local rank 0, of 2", str(found)))
    assert ranks == ["0", "1"]


@pytest.mark.parametrize("late", [only_in_release(1), 2])
def test_the_start_waits_for_the_late_pod(late, pods, command):
    line = on_one_cpu(command, MEET)
    pods.publish()
    log = {"TORCH_CPP_LOG_LEVEL": "INFO"}  # otherwise it does not say that it waits
    with pods.start(3 - late, line, **log) as early:
        if late == 1:
            early.wait_for("is listening yet, will retry")
        else:
            pods.wait_until_it_listens()
        with pods.start(late, line) as job:
            assert_met(early, job)


@pytest.mark.release
def test_the_name_of_the_first_pod_can_be_late(pods, command):
    line = on_one_cpu(command, MEET)
    with pods.start(1, line) as first, pods.start(2, line) as second:
        for job in (first, second):
            job.wait_for(UNKNOWN)
        pods.publish()
        assert_met(first, second)


@pytest.mark.release
def test_without_is_host_a_late_name_is_too_late(pods, command):
    """Each torchrun asks once whether the name is its own. Nobody opens the port."""
    line = re.sub(r"is_host=.*?,", "", on_one_cpu(command, MEET))
    line = line.replace("read_timeout=900", "read_timeout=10")
    with pods.start(1, line) as first, pods.start(2, line) as second:
        for job in (first, second):
            job.wait_for(UNKNOWN)
        pods.publish()
        for job in (first, second):
            done = job.wait()
            assert done.returncode == 1
            assert "RendezvousConnectionError" in done.stderr


@pytest.mark.release
def test_a_pod_that_waits_alone_gives_up_after_join_timeout(pods, command):
    pods.publish()
    line = on_one_cpu(command, MEET).replace("join_timeout=900", "join_timeout=2")
    with pods.start(1, line) as job:
        done = job.wait()
    assert done.returncode == 1
    assert "RendezvousTimeoutError" in done.stderr


# ---- the end -------------------------------------------------------------------------
@pytest.fixture
def training(command, tmp_path):
    """The command of a pod that trains, and saves to the folder checkpoints."""
    script = tmp_path / "wait.py"
    script.write_text(WAIT_IN_STEP_36)
    return on_one_cpu(command, script, tmp_path / "checkpoints")


@contextlib.contextmanager
def waiting_pod(pods, line):
    """Start a pod alone, with a process 1 of its own; yield both in step 36."""
    words = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    line = shlex.quote(line.replace("--nnodes=2", "--nnodes=1"))
    pods.publish()
    with pods.start(1, f"exec {shlex.join(words)} sh -c {line}", WAITS=1) as job:
        job.wait_for("waits for a signal")
        (first,) = psutil.Process(job.pid).children()
        yield job, first


def test_sigterm_to_process_1_saves_a_checkpoint(pods, training, tmp_path):
    """As Kubernetes sends it: to the first process of the container alone."""
    with waiting_pod(pods, training) as (job, first):
        assert first.cmdline()[1].endswith("/torchrun")  # and not a shell
        first.send_signal(signal.SIGTERM)
        done = job.wait()
    assert "rank 0 stopped after step 36" in done.stdout
    assert (tmp_path / "checkpoints").exists()
    assert done.returncode == 1  # torchrun's, and not the 143 of its rank


@pytest.mark.release
def test_ctrl_c_saves_nothing(pods, training, tmp_path):
    """As `docker run` sends it: SIGINT to process 1."""
    with waiting_pod(pods, training) as (job, first):
        first.send_signal(signal.SIGINT)
        done = job.wait()
    assert "Process 1 got signal: 2" in done.stderr
    assert "KeyboardInterrupt" in done.stderr
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.release
def test_sigterm_to_a_shell_as_process_1_is_lost(pods, training, tmp_path):
    """The kernel drops it at once: it is not even pending."""
    line = f"{training.removeprefix('exec ')}; echo done"
    with waiting_pod(pods, line) as (job, first):
        assert first.name() == "sh"
        first.send_signal(signal.SIGTERM)
        assert not any(commands.in_mask(first, mask) for mask in ("SigPnd", "ShdPnd"))
        first.send_signal(signal.SIGKILL)  # its children are killed with it
        done = job.wait()
    assert "stopped after step" not in done.stdout
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.release
@pytest.mark.parametrize("evicted", [1, 2])
def test_an_evicted_pod_and_its_replacement(evicted, pods, pod, training):
    """The other pod starts its ranks again, unless the evicted one had the store."""
    pods.publish()
    (container,) = pod["containers"]
    variables = {each["name"]: each["value"] for each in container["env"]}
    with (
        pods.start(evicted, training, WAITS=1, **variables) as gone,
        pods.start(3 - evicted, training, **variables) as stays,
    ):
        gone.wait_for("waits for a signal")
        gone.child.send_signal(signal.SIGTERM)
        done = gone.wait()
        assert "stopped after step 36" in done.stdout
        assert done.returncode == 1
        if evicted == 1:
            done = stays.wait()
            assert done.returncode == 1
            assert "RendezvousConnectionError" in done.stderr
            return
        with pods.start(evicted, training, **variables) as replacement:
            for job in (stays, replacement):
                done = job.wait()
                assert done.returncode == 0
                assert "took steps 37" in done.stdout
