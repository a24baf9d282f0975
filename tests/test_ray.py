"""Ray Train trains as stage 03 does, to the same weights; `make ray` runs this."""

import contextlib
import re
import secrets
import tempfile

import psutil
import pytest

from nbtools import harness
from tests.neighbors_harness import FLAGS
from tests.neighbors_harness import Neighbor
from tests.neighbors_harness import assert_trains_as_stage_03
from tests.neighbors_harness import assert_trains_other_weights
from tools.stages import ROOT

WITHOUT_DDP = ("ray.train.torch.prepare_model(model)", "model")
RAYS_SAMPLER = (
    "sampler=DistributedSampler(train_set, seed=args.seed, drop_last=True),",
    "shuffle=True,",
)
# Ray reads these variables. With them it keeps to the folder for temporary files and to
# this machine, and what it prints is only what the program prints.
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",  # otherwise it reports how it is used
    # Despite its name, on Linux, too: otherwise Ray listens on an address that other
    # machines can reach.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_AUTH_MODE": "token",
    # Otherwise it writes a token into the home directory, and leaves it there.
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "RAY_LOG_TO_DRIVER": "0",
    # A session on a busy machine can take longer to start than Ray allows by default.
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "200",
}
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


def train(ray, folder, script=None, *flags):
    """Train by the command that the program shows; return what `run_at_home` does.

    script: another one in the program's place. Ray waits 30 seconds for its own
    processes. On a busy machine that can be too short.
    """
    python, shown, *words = ray.command(f".venv-ray/bin/python {ray.script} --nproc=2")
    words = [ROOT / python, script or ROOT / shown, *words, *FLAGS, *flags]
    words += ["--out-dir", folder / "out"]
    done = run_at_home(words, folder)
    if "The current node timed out during startup" in done.stderr:
        done = run_at_home(words, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def run_at_home(words, folder):
    """Run a command in a home directory of its own.

    Returns its Done, with `left`: the names in the home directory, and `addresses`:
    (program, address) of each TCP port on which one of its processes listened. Its
    processes have ended then.
    """
    home = folder / "home"
    home.mkdir(exist_ok=True)
    members, addresses = set(), set()
    # Not in `folder`: the path of a socket has at most 107 characters.
    with tempfile.TemporaryDirectory() as temporary:
        variables = {"HOME": home, "TMPDIR": temporary, "RAY_TMPDIR": temporary}
        with harness.start(words, folder, **variables, **QUIET) as job:

            def ended():
                running = job.running()
                for process in job.look():
                    members.add(process)
                    addresses.update(listening(process))
                return not running

            harness.wait_until(ended, harness.LIMIT, job.screen, every=1)
            done = job.wait()
        harness.assert_gone(members, [], 60)
    done.left = sorted(path.name for path in home.iterdir())
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


def test_ray_trains_to_the_weights_of_stage_03(ray, trained, tmp_path, record_property):
    record_property("tested with", ray.version("ray"))
    done = train(ray, tmp_path)
    assert_trains_as_stage_03(done, tmp_path, trained)
    assert done.left == ["ray_results"]
    # In a worker torch's store listens on all addresses, as it does under torchrun.
    outside = {name for name, address in done.addresses if "127.0.0.1" not in address}
    assert all(name.startswith("ray::") for name in outside), outside


def test_without_prepare_model_the_weights_differ(ray, trained, tmp_path):
    train(ray, tmp_path, ray.changed(tmp_path / "project", WITHOUT_DDP))
    assert_trains_other_weights(tmp_path, trained)


def test_rays_own_sampler_ignores_the_seed_and_the_loaders_options(ray, tmp_path):
    """It has seed 0 and pads; persistent_workers and prefetch_factor are lost."""
    found = tmp_path / "found"
    after = "    loader = ray.train.torch.prepare_data_loader(loader)\n"
    checked = (after, after + CHECKS.format(file=str(found)))
    script = ray.changed(tmp_path / "project", RAYS_SAMPLER, checked)
    train(ray, tmp_path, script, "--seed", "7", "--workers", "1")
    assert re.fullmatch(r"0 False \(False, 2\)", found.read_text())
