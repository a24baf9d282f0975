"""Ray, Horovod, TRL and torchft do what other_libraries/README.md says of them.

Each is pinned, in an environment of its own that `make ray`, `make horovod`, `make trl`
or `make torchft` makes before it runs its tests here. A push does not run them.
"""

import contextlib
import functools
import os
import re
import secrets
import shutil
import tempfile

import psutil
import pytest
from torch.utils.data import DistributedSampler

from harness import commands
from harness.stages import ROOT
from harness.stages import first_with
from harness.weights import max_abs_diff
from tests.neighbors_harness import FOLDER
from tests.neighbors_harness import docstring
from tests.training import DOUBLE
from tests.training import replace_once
from tests.training import train_in_forks

pytestmark = pytest.mark.release

STAGE = first_with("ddp")
FLAGS = (*DOUBLE, "--device", "cpu")
PAGE = (FOLDER / "README.md").read_text()
LIBRARIES = ("ray", "horovod", "trl", "torchft")
# Of those that train what stage 03 trains: what each line that they print begins with.
PREFIXES = {"ray": "", "horovod": "[0]<stdout>:"}
NOT_DIVISIBLE = "generation_batch_size (16) must be divisible by num_generations (3)"
BROADCAST = "hvd.broadcast_parameters(model.state_dict(), root_rank=0)"
# {a library and what is changed: a text that its program has once, and another}
OTHER_WEIGHTS = {
    "ray, without prepare_model": ("ray.train.torch.prepare_model(model)", "model"),
    "horovod, a step without gradients": (
        BROADCAST,
        f"{BROADCAST}\n    hvd.broadcast_optimizer_state(optimizer, root_rank=0)",
    ),
    "horovod, no average": (
        "    optimizer = hvd.DistributedOptimizer(\n"
        "        optimizer, named_parameters=model.named_parameters()\n"
        "    )\n",
        "",
    ),
}
# The same, and what is then on standard error.
ERRORS = {
    "horovod, channels_last": (
        "model.to(args.device, args.dtype)",
        "model.to(args.device, args.dtype, memory_format=args.memory_format)",
        "ValueError: Tensor is required to be contiguous.",
    ),
    "trl, the same reward for all": (
        'text.count("a") / max(len(text), 1)',
        "1.0",
        "AssertionError: rewards: 1.0, 1.0",
    ),
    "trl, no whole groups": (
        "num_generations=4",
        "num_generations=3",
        f"ValueError: {NOT_DIVISIBLE}",
    ),
}
# The same, and the line of torchft's program that has a difference then.
DIFFERENCES = {
    "torchft, forgets momentum": (
        '        optimizer.load_state_dict(state["optimizer"])\n',
        "",
        "those of group 1",
    ),
    "torchft, averages over two": (
        "(batch_loss(model, step, group) / groups)",
        "(batch_loss(model, step, group) / 2)",
        "one process",
    ),
}
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


# ---- a library and its program -------------------------------------------------------
class Library:
    """A library in .venv-NAME, and the program NAME_train.py that uses it.

    Without the environment, tests that ask for the library are skipped, or fail if
    REQUIRE_NEIGHBORS is set.
    """

    def __init__(self, name):
        self.name, self.environment = name, ROOT / f".venv-{name}"
        self.script = FOLDER / f"{name}_train.py"
        if not (self.environment / "installed").exists():
            assert "REQUIRE_NEIGHBORS" not in os.environ, f"type: make {name}"
            pytest.skip(f"{name} is not installed; type: make {name}")

    def version(self):
        """Return the line of its requirements that pins it."""
        text = (FOLDER / f"requirements-{self.name}.txt").read_text()
        return re.search(rf"^{self.name}\S*==.*", text, re.MULTILINE)[0]

    def changed(self, folder, *replacements):
        """Copy the program and common/, and replace texts that are there once."""
        script = folder / "project" / FOLDER.name / self.script.name
        script.parent.mkdir(parents=True)
        ignored = shutil.ignore_patterns("__pycache__")
        copy = folder / "project/common"
        shutil.copytree(ROOT / "common", copy, ignore=ignored)
        replace_once(self.script, *replacements, target=script)
        return script

    def run(self, folder, script=None, code=0, flags=()):
        """Run the command that the program's docstring shows; return its Done.

        Of those that train as stage 03 does, with FLAGS and in `folder`/out. script:
        another one in the program's place.
        """
        words, _ = docstring(self.script.name)
        place = words.index(f"{FOLDER.name}/{self.script.name}")
        words[place] = script or self.script
        programs = self.environment / "bin"
        if self.name == "horovod":
            words[0] = programs / words[0]
        else:
            assert words[0] == f"{self.environment.name}/bin/python"
            words[0] = programs / "python"
        if self.name in PREFIXES:
            words += [*FLAGS, *flags, "--out-dir", folder / "out"]
        if self.name == "ray":
            return run_at_home(words, folder)
        variables = {"HOME": folder, "TMPDIR": folder, "CUDA_VISIBLE_DEVICES": ""}
        variables["PATH"] = f"{programs}:{os.environ['PATH']}"
        return commands.run(words, folder, code, **variables)


def run_at_home(words, folder, again=True):
    """Run a command of Ray in a home directory of its own.

    Returns its Done, with `left`: the names in the home directory, and `addresses`:
    (program, address) of each TCP port on which one of its processes listened. Its
    processes have ended then. Ray waits 30 seconds for them to start, which can be too
    short on a busy machine: then it is run again.
    """
    home = folder / "home"
    home.mkdir(exist_ok=True)
    members, addresses = set(), set()
    # Not in `folder`: the path of a socket has at most 107 characters.
    with tempfile.TemporaryDirectory() as temporary:
        variables = {"HOME": home, "TMPDIR": temporary, "RAY_TMPDIR": temporary}
        with commands.start(words, folder, **variables, **QUIET) as job:

            def ended():
                running = job.running()
                for process in job.look():
                    members.add(process)
                    addresses.update(listening(process))
                return not running

            commands.wait_until(ended, commands.LIMIT, job.screen, every=1)
            done = job.wait()
        commands.assert_gone(members, [], 60)
    if again and "The current node timed out during startup" in done.stderr:
        return run_at_home(words, folder, again=False)
    assert done.returncode == 0, done.stdout + done.stderr
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


library = functools.cache(Library)


def named(change):
    """Return the library of a change in one of the tables."""
    return library(change.partition(",")[0])


@pytest.fixture
def reference(trained):
    """Return stage 03's run on two processes in double precision."""
    return trained(STAGE, 2, *DOUBLE, how=train_in_forks)


# ---- they do what the page says ------------------------------------------------------
@pytest.mark.parametrize("name", PREFIXES)
def test_two_processes_train_the_weights_of_stage_03(
    name, reference, tmp_path, record_property
):
    """And print what it prints. Ray leaves nothing behind but its results."""
    record_property("tested with", library(name).version())
    done = library(name).run(tmp_path)
    assert max_abs_diff(reference.weights, tmp_path / "out/last.pt") <= 1e-10
    shown = [line.partition(", val")[0] for line in reference.epochs]
    assert done.stdout.splitlines() == [PREFIXES[name] + line for line in shown]
    if name == "ray":
        assert done.left == ["ray_results"]
        # In a worker torch's store listens on all addresses, as under torchrun.
        outside = {name for name, ip in done.addresses if "127.0.0.1" not in ip}
        assert all(name.startswith("ray::") for name in outside), outside


@pytest.mark.parametrize("change", OTHER_WEIGHTS)
def test_a_changed_line_gives_other_weights(change, reference, tmp_path):
    script = named(change).changed(tmp_path, OTHER_WEIGHTS[change])
    named(change).run(tmp_path, script)
    assert max_abs_diff(reference.weights, tmp_path / "out/last.pt") > 1e-6


@pytest.mark.parametrize("change", ERRORS)
def test_a_changed_line_ends_with_an_error(change, tmp_path):
    *texts, error = ERRORS[change]
    script = named(change).changed(tmp_path, texts)
    assert error in named(change).run(tmp_path, script, code=1).stderr


def test_the_page_has_the_error_of_trl():
    assert f"`ValueError: {NOT_DIVISIBLE}`" in PAGE


def test_the_sampler_of_ray_ignores_the_seed_and_the_loaders_options(tmp_path):
    """It has seed 0 and pads; persistent_workers and prefetch_factor are lost."""
    found = tmp_path / "found"
    after = "    loader = ray.train.torch.prepare_data_loader(loader)\n"
    checked = (after, after + CHECKS.format(file=str(found)))
    script = library("ray").changed(tmp_path, RAYS_SAMPLER, checked)
    flags = ("--seed", "7", "--workers", "1")
    library("ray").run(tmp_path, script, flags=flags)
    assert re.fullmatch(r"0 False \(False, 2\)", found.read_text())


def test_a_sampler_that_horovod_does_not_tell_asks_for_a_process_group():
    with pytest.raises((RuntimeError, ValueError), match="process group"):
        DistributedSampler(range(4))


def test_horovod_without_a_compiler_gets_one_line(tmp_path):
    """tools/neighbor_env.sh says what is missing, and touches nothing."""
    for program in ("bash", "dirname"):
        (tmp_path / program).symlink_to(shutil.which(program))
    script = ROOT / "tools/neighbor_env.sh"
    done = commands.run([script, "horovod", "python"], tmp_path, 2, PATH=tmp_path)
    (line,) = done.stderr.splitlines()
    assert "g++ is missing" in line


def test_trl_trains_on_two_processes(tmp_path, record_property):
    """The reward rises, and both processes have the same weights."""
    record_property("tested with", library("trl").version())
    screen = library("trl").run(tmp_path).stdout
    _, printed = docstring("trl_train.py")
    pattern = "\n".join(".*".join(map(re.escape, s.split("..."))) for s in printed)
    assert re.fullmatch(pattern + "\n", screen), screen


def test_the_defaults_of_trl():
    names = ["learning_rate", "lr_scheduler_type", "beta", "use_vllm"]
    code = "from trl import GRPOConfig as g; f = g.__dataclass_fields__\n"
    code += f"print(*(f[name].default for name in {names}))"
    done = commands.run([library("trl").environment / "bin/python", "-c", code])
    assert done.stdout.splitlines()[-1] == "1e-06 linear 0.0 False"


def but_when(lines):
    """Leave out the step in which group 1 is back: that depends on how soon it can."""
    return [re.sub(r"(took step|to) 1\d", r"\1 N", line) for line in lines]


def test_with_torchft_the_other_group_trains_on(tmp_path, record_property):
    """With the lines that the program shows."""
    record_property("tested with", library("torchft").version())
    _, printed = docstring("torchft_train.py")
    shown = library("torchft").run(tmp_path).stdout.splitlines()
    assert but_when(shown) == but_when(printed)


@pytest.mark.parametrize("change", DIFFERENCES)
def test_a_changed_line_makes_a_difference(change, tmp_path):
    *texts, off = DIFFERENCES[change]
    script = named(change).changed(tmp_path, texts)
    shown = named(change).run(tmp_path, script).stdout.splitlines()
    (line,) = [line for line in shown if off in line]
    assert float(line.split()[-1]) > 1e-6
