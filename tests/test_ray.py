"""Ray Train trains as stage 03 does, to the same weights; `make ray` runs this."""

import contextlib
import re
import tempfile
from pathlib import Path

import psutil
import pytest

from tests import harness
from tests.neighbors_harness import DOUBLE
from tests.neighbors_harness import Neighbor
from tests.neighbors_harness import assert_as_stage_03
from tests.neighbors_harness import difference_from_stage_03
from tools.stages import ROOT

ALONE = ("ray.train.torch.prepare_model(model)", "model")
RAYS_SAMPLER = (
    "sampler=DistributedSampler(train_set, seed=args.seed, drop_last=True),",
    "shuffle=True,",
)
CHECKS = """
    if dist.get_rank() == 0:
        from pathlib import Path
        sampler, dataset = loader.sampler, loader.dataset
        kept = loader._dataloader.persistent_workers, loader._dataloader.prefetch_factor
        Path({file!r}).write_text(f"{{sampler.seed}} {{sampler.drop_last}} {{kept}}")
"""


@pytest.fixture(scope="module")
def ray():
    return Neighbor("ray")


def train(ray, folder, script, *flags):
    """Train by the command that the program shows; return what `train_once` does.

    Ray waits 30 seconds for its own processes. On a busy machine that can be too short.
    """
    command = f".venv-ray/bin/python {ray.script} --nproc=2"
    assert f"\n$ {command}\n" in (ROOT / ray.script).read_text()
    arguments = [ray.python, script, "--nproc=2", *DOUBLE, *flags]
    arguments += ["--out-dir", folder / "out"]
    done = train_once(arguments, folder)
    if "The current node timed out during startup" in done.stderr:
        done = train_once(arguments, folder)
    return done


def train_once(arguments, folder):
    """Run a command in a home directory of its own.

    Returns `run`'s result, with `left`: what is left in the home and in the folder for
    temporary files, and `addresses`, on which Ray's processes listened.
    """
    home = folder / "home"
    home.mkdir(exist_ok=True)
    addresses, members = set(), {}
    # Not in `folder`: the path of a socket has at most 107 characters.
    with tempfile.TemporaryDirectory() as temporary:
        variables = {
            "HOME": str(home),
            "TMPDIR": temporary,
            "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "200",
        }
        with harness.started(arguments, folder, **variables) as child:

            def ended():
                for process in harness.family(child.pid):
                    members[process.pid] = process
                    addresses.update(listening(process))
                return child.poll() is not None

            harness.wait_until(ended, 300, child.screen, every=1)
        done = harness.result(child.returncode, folder)
        harness.assert_gone(members.values(), [], 60)
        left = [*home.rglob("*"), *Path(temporary).iterdir()]
    # torch makes this one, also without Ray.
    done.left = [path for path in left if not path.name.startswith("torchinductor_")]
    done.addresses = addresses
    return done


def listening(process):
    """Return (program, address) for each TCP port on which a process listens."""
    with contextlib.suppress(psutil.Error):
        return {
            (process.name(), connection.laddr.ip)
            for connection in process.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        }
    return set()


def test_ray_trains_to_the_weights_of_stage_03(ray, trained, tmp_path, capsys):
    done = train(ray, tmp_path, ROOT / ray.script)
    assert_as_stage_03(ray, "ray", done, trained, tmp_path, capsys)
    assert not done.left
    # In a worker torch's store listens on all addresses, as it does under torchrun.
    outside = {name for name, address in done.addresses if "127.0.0.1" not in address}
    assert all(name.startswith("ray::") for name in outside), outside


def test_without_prepare_model_the_weights_differ(ray, trained, tmp_path):
    done = train(ray, tmp_path, ray.changed(tmp_path / "project", ALONE))
    assert done.returncode == 0, done.stdout + done.stderr
    assert difference_from_stage_03(trained, tmp_path / "out/last.pt") > 1e-6


def test_rays_own_sampler_ignores_the_seed_and_the_loaders_options(ray, tmp_path):
    """It has seed 0 and pads; persistent_workers and prefetch_factor are lost."""
    found = tmp_path / "found"
    after = "    loader = ray.train.torch.prepare_data_loader(loader)\n"
    checked = (after, after + CHECKS.format(file=str(found)))
    script = ray.changed(tmp_path / "project", RAYS_SAMPLER, checked)
    done = train(ray, tmp_path, script, "--seed", "7", "--workers", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.fullmatch(r"0 False \(False, 2\)", found.read_text())
