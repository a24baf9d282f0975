"""Stop the process that has started the ranks of endless.py: what do they do?

python 04_ddp_spawn/demos/stopped.py

That process is mp.spawn's parent or torchrun. It runs on Linux only, where the kernel
tells the ranks of mp.spawn that their parent has died.
"""

import itertools
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

PYTHON, PROGRAM = sys.executable, Path(__file__).with_name("endless.py")
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
LAUNCHERS = {"mp.spawn": [PYTHON], "torchrun": [PYTHON, *TORCHRUN]}
STOPS = (signal.SIGTERM, signal.SIGKILL)
PATIENCE = 15  # seconds; ranks that still train then have not been stopped


def texts(folder, pattern):
    """Return the texts of both ranks' files, or None if one is missing or empty."""
    found = [path.read_text() for path in folder.glob(pattern)]
    return found if len(found) == 2 and all(found) else None


def wait_for(condition, seconds):
    """Return what `condition()` returns when that is true, or after so many seconds."""
    end = time.monotonic() + seconds
    while not (value := condition()) and time.monotonic() < end:
        time.sleep(0.05)
    return value


def stop(how, launcher):
    """Start a run, stop the process that started the ranks, and say what they did."""
    with TemporaryDirectory() as folder:
        parent = subprocess.Popen(
            [*LAUNCHERS[launcher], PROGRAM, folder],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        folder = Path(folder)
        started = wait_for(lambda: texts(folder, "*.pid"), 200)
        parent.send_signal(how)
        wait_for(lambda: texts(folder, "*.end"), PATIENCE)
        (folder / "enough").touch()
        ends = wait_for(lambda: texts(folder, "*.end"), 200)
        parent.wait(200)
        assert started and ends, f"{how}, {launcher}: the ranks did not start or end"
    return f"{how.name:8} {launcher}: the ranks {' or '.join(sorted(set(ends)))}"


def main():
    # otherwise, where SIGINT is ignored, so do the processes that we start
    signal.signal(signal.SIGINT, signal.default_int_handler)
    cases = itertools.product(STOPS, LAUNCHERS)
    with ThreadPoolExecutor(max_workers=3) as pool:
        for line in pool.map(lambda case: stop(*case), cases):
            print(line, flush=True)


if __name__ == "__main__":
    main()
