"""tools/gpu_usage.py, with a program named nvidia-smi that prints recorded lines."""

import math
import os
import signal

import pytest

from tools import gpu_usage
from tools import harness

pytestmark = pytest.mark.ci

# In the format of --format=csv,noheader,nounits. GPU 1 has MIG switched on, and so no
# utilization; GPU 2 does not report its power.
LINES = """\
2026/11/25 23:59:59.250, 0, 98, 1980, 512.33, 40960
2026/11/25 23:59:59.253, 1, [N/A], 345, 87.02, 512
2026/11/25 23:59:59.255, 2, 0, 345, [Not Supported], 0
2026/11/26 00:00:00.250, 0, 100, 1215, 120.50, 41984
2026/11/26 00:00:00.253, 1, [N/A], 345, 88.00, 512
2026/11/26 00:00:00.255, 2, 3, 360, [Not Supported], 1024
"""
SECONDS = {0: (0, 1), 1: (0.003, 1.003), 2: (0.005, 1.005)}
NAN = math.nan
DRAWN = {
    "utilization (%)": {0: (98, 100), 1: (NAN, NAN), 2: (0, 3)},
    "clock (MHz)": {0: (1980, 1215), 1: (345, 345), 2: (345, 360)},
    "power (W)": {0: (512.33, 120.5), 1: (87.02, 88), 2: (NAN, NAN)},
    "memory (GiB)": {0: (40, 41), 1: (0.5, 0.5), 2: (0, 1)},
}
# It prints its own arguments to standard error, then the lines, and waits as --loop-ms
# does. The lines are in the file when "printed" is on the screen.
SMI = """#!/bin/sh
echo "$@" >&2
cat "$LINES"
echo printed >&2
exec sleep 3600
"""


@pytest.fixture
def smi(tmp_path):
    """Return a function that makes the program; it returns the variables to use it."""

    def make(text=SMI):
        program = tmp_path / "bin/nvidia-smi"
        program.parent.mkdir()
        program.write_text(text)
        program.chmod(0o755)
        (tmp_path / "lines").write_text(LINES)
        path = f"{program.parent}:{os.environ['PATH']}"
        return {"PATH": path, "LINES": tmp_path / "lines"}

    return make


@pytest.fixture
def usage(tmp_path):
    path = tmp_path / "usage.csv"
    path.write_text(LINES)
    return path


def command(*words):
    return ["python", "-m", "tools.gpu_usage", *words]


def error(*words, **variables):
    """Return the one line that a command prints when it fails with exit code 2."""
    (line,) = harness.run(command(*words), code=2, **variables).stderr.splitlines()
    return line


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_record_writes_until_a_signal(number, smi, tmp_path):
    path = tmp_path / "usage.csv"
    with harness.start(command("record", path), tmp_path / "job", **smi()) as job:
        job.wait_for("printed")
        program = job.look()[1:]
        job.child.send_signal(number)
        done = job.wait()
    assert done.returncode == 0
    asked, _, last = done.stderr.splitlines()
    assert f"--query-gpu={','.join(gpu_usage.FIELDS)} --format=csv,noheader" in asked
    assert "--loop-ms=1000" in asked
    assert last == f"{path}: written until now"
    assert path.read_text() == LINES
    assert len(program) == 1
    harness.assert_gone(program, [], harness.LIMIT)


def test_each_gpu_is_a_line_in_each_plot(usage):
    plots = gpu_usage.draw(gpu_usage.read(usage)).axes
    assert [plot.get_ylabel() for plot in plots] == [*DRAWN]
    for plot, series in zip(plots, DRAWN.values(), strict=True):
        assert [line.get_label() for line in plot.lines] == ["GPU 0", "GPU 1", "GPU 2"]
        for line, (gpu, values) in zip(plot.lines, series.items(), strict=True):
            assert tuple(line.get_xdata()) == pytest.approx(SECONDS[gpu])
            assert tuple(line.get_ydata()) == pytest.approx(values, nan_ok=True)


def test_a_line_that_was_cut_off_is_left_out(usage):
    whole = gpu_usage.read(usage)
    usage.write_text(LINES + "2026/11/26 00:00:01.250, 0, 10")
    assert str(gpu_usage.read(usage)) == str(whole)  # nan is not equal to itself


def test_plot_writes_a_picture(usage, tmp_path):
    harness.run(command("plot", usage, tmp_path / "usage.png"))
    assert (tmp_path / "usage.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in tmp_path.iterdir()} == {"usage.csv", "usage.png"}


# ---- what it cannot do ---------------------------------------------------------------
def test_without_nvidia_smi(tmp_path):
    said = error("record", tmp_path / "usage.csv", PATH=tmp_path)
    assert "no nvidia-smi here" in said
    assert not [*tmp_path.iterdir()]


def test_an_nvidia_smi_that_fails(smi, tmp_path):
    fails = "#!/bin/sh\necho 'NVIDIA-SMI has failed.'\nexit 9\n"
    said = error("record", tmp_path / "usage.csv", **smi(fails))
    assert said.endswith("ended by itself: NVIDIA-SMI has failed.")
    assert not (tmp_path / "usage.csv").exists()


def test_record_keeps_a_file_that_is_there(smi, usage):
    said = error("record", usage, **smi())
    assert said.endswith("usage.csv exists already: choose another name")
    assert usage.read_text() == LINES


@pytest.mark.parametrize(
    "text, named",
    [
        ("", "no line is in it"),
        ("2026/11/26 00:00:01.250, 0, 10", "no line is in it"),
        (LINES.replace("100,", "a lot,"), "line 4: not a line of `record`"),
        (LINES.replace(", 41984", ""), "line 4: not a line of `record`"),
        (LINES.replace(", 41984", ", 1, 2"), "line 4: not a line of `record`"),
        ("time, GPU\n", "line 1: not a line of `record`"),
    ],
)
def test_a_broken_file_is_one_line(text, named, usage, tmp_path):
    usage.write_text(text)
    assert named in error("plot", usage, tmp_path / "usage.png")
    assert not (tmp_path / "usage.png").exists()


@pytest.mark.parametrize(
    "words, named",
    [
        (("plot", "missing.csv", "usage.png"), "missing.csv: No such file"),
        (("plot", "usage.csv", "usage.txt"), "must end in .png, .svg, .pdf"),
        (("plot", "usage.csv", "nowhere/usage.png"), "usage.png: No such file"),
        (("record", "nowhere/usage.csv"), "usage.csv: No such file"),
    ],
)
@pytest.mark.usefixtures("usage")
def test_a_wrong_path_is_one_line(words, named, smi, tmp_path):
    paths = [tmp_path / word for word in words[1:]]
    assert named in error(words[0], *paths, **smi())
