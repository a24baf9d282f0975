"""No script has a line that its stage does not use.

Each stage is run in the ways that its features ask for, and coverage notes the lines
that any process of any run executes. A line that is left over belongs to no feature.
"""

import functools
import multiprocessing.util
import signal

import coverage
import pytest

from harness.stages import ROOT
from harness.stages import features
from harness.stages import stages
from harness.stages import with_feature
from tests import fault_injection
from tests.conftest import only_in_release
from tests.training import call_all
from tests.training import small_workload
from tests.training import start_stage

pytestmark = [pytest.mark.ci, pytest.mark.slow]

# Without a GPU, the lines below these conditions are left out.
ONLY_ON_GPUS = [r'if device\.type == "cuda":']
# The others take half a minute each, and these two have most of their lines.
LAST = with_feature("images")[-1], with_feature("text")[-1]
STEPS = 5  # in an epoch
FULL_DISK = 200_000  # bytes of a file: less than a checkpoint takes, more than coverage
# {feature: flags of a run that trains}; {} is the test's folder
TRAINS = {
    "amp": ["--amp", "fp16", "--clip-grad", "1"],
    "accumulation": ["--grad-accum-steps", "2"],
    "checkpoints": ["--checkpoint-dir", "{}/checkpoints", "--checkpoint-every", "2"],
}
# {feature: flags that the script refuses with exit code 2}
REFUSED = {
    "spawn": ["--data", "cifar10", "--data-dir", "{}"],  # it is not there
    "amp": ["--amp", "bf16", "--dtype", "float64"],
    "accumulation": ["--grad-accum-steps", "7"],
    "tensor_parallel": ["--tensor-parallel", "3"],  # of four heads
}


def ways(having, folder, fault=fault_injection):
    """Yield the runs that these features need: their flags and, if need be, options.

    The options are `code`, the exit code that is expected, and those of `start_stage`.
    A later run may need the files that an earlier one wrote.
    """
    flags = [word for name in TRAINS if name in having for word in TRAINS[name]]
    overflow = functools.partial(fault.infinite_gradient, 2, 0)
    options = {"prepare": overflow} if "amp" in having else {}
    yield ["--out-dir", "{}", *flags], options
    yield ["--evaluate", "{}/last.pt"], {}
    diverging = ["--lr", "1e30"]
    if "checkpoints" in having:
        diverging += ["--checkpoint-dir", "{}/diverged"]
    yield diverging, {"code": 1}
    for name in REFUSED:
        if name in having:
            yield REFUSED[name], {"code": 2}
    if "spawn" in having:
        yield [], {"processes": None}
    if "slurm" in having:
        task = dict(SLURM_STEP_NUM_TASKS="1", SLURM_PROCID="0", SLURM_LOCALID="0")
        no_launcher = dict.fromkeys(["RANK", "WORLD_SIZE", "LOCAL_RANK"])
        yield [], {"processes": 1, **task, **no_launcher}
    if "exact_eval" in having and "images" in having:
        yield ["--arch", "resnet18", "--images", "48"], {}  # it has batch norm
    if "signals" in having:
        for step in (3, STEPS):
            told = functools.partial(fault.signalled, step, "SIGTERM")
            options = {"code": 128 + signal.SIGTERM, "prepare": told}
            yield ["--checkpoint-dir", f"{{}}/stopped-in-{step}"], options
    if "tensor_parallel" in having:
        yield ["--tensor-parallel", "2"], {}
        yield ["--tensor-parallel", "2"], {"processes": 1, "code": 2}
    if "sharded_checkpoints" in having:
        full_disk = functools.partial(fault.no_large_files, FULL_DISK)
        yield ["--checkpoint-dir", "{}/full"], {"prepare": full_disk}
        _, latest = sorted((folder / "checkpoints").glob("step-*"))
        max(latest.glob("*.distcp")).unlink()  # the checkpoint before can be read
    if "checkpoints" in having:
        yield flags, {}
        yield [*flags, "--lr", "0.07"], {"code": 2}  # the checkpoints' is another
        for pattern in ("step-*.pt", "step-*/*.distcp"):
            for damaged in (folder / "checkpoints").glob(pattern):
                damaged.write_bytes(b"")
        yield flags, {"code": 2}


def note_lines(settings):
    """Have this process, and those that it spawns, note the lines that they execute."""
    noted = coverage.Coverage(config_file=settings)
    noted.start()

    def save():
        noted.stop()
        noted.save()

    multiprocessing.util.Finalize(None, save, exitpriority=100)


def write_settings(folder, device):
    """Write the settings of coverage, for all processes, and return their file."""
    conditions = ["if __name__", *(ONLY_ON_GPUS if device == "cpu" else [])]
    left_out = "\n    ".join(conditions)
    file = folder / "coverage.ini"
    file.write_text(
        f"""[run]
data_file = {folder}/lines
parallel = true
concurrency = multiprocessing
include = */train.py
[report]
exclude_lines =
    {left_out}
"""
    )
    return str(file)


@pytest.mark.parametrize(
    "stage", [only_in_release(stage, unless=stage in LAST) for stage in stages()]
)
def test_every_line_is_used(stage, several, device, tmp_path):
    settings = write_settings(tmp_path, device)
    having = features(stage)
    work = [*small_workload(stage, 48 * STEPS).flags, "--epochs", "1"]
    if "text" in features(stage):
        work += ["--sample", "1"]
    work += ["--device", device]
    for number, (flags, options) in enumerate(ways(having, tmp_path)):
        code = options.pop("code", 0)
        processes = several if "distributed" in having else 1
        processes = options.pop("processes", processes)
        prepare = functools.partial(note_lines, settings)
        prepare = functools.partial(call_all, prepare, options.pop("prepare", None))
        flags = [*work, *(flag.format(tmp_path) for flag in flags)]
        arguments = stage, processes, flags, tmp_path / f"run-{number}"
        with start_stage(*arguments, prepare=prepare, **options) as job:
            done = job.wait()
        assert [one.returncode for one in done.ranks] == [code] * len(done.ranks), done
    noted = coverage.Coverage(config_file=settings)
    noted.combine([str(tmp_path)])
    script = ROOT / stage / "train.py"
    _, statements, _, unused, _ = noted.analysis2(str(script))
    assert len(statements) > 50
    lines = script.read_text().splitlines()
    assert not [f"{number}: {lines[number - 1]}" for number in unused]
