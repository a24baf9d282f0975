"""Raise an error in a process with a loader's worker that ignores SIGTERM.

python 10_preemption/demos/ignoring_workers.py SIG_IGN 15
python 10_preemption/demos/ignoring_workers.py ignore_launcher_sigterm 300

The name says how. If the process has not ended after so many seconds, it shows where it
is, and ends.
"""

import faulthandler
import signal
import sys
from pathlib import Path

from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common.loader import ignore_launcher_sigterm


def sig_ign(_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def main(way, seconds):
    ways = {"SIG_IGN": sig_ign, "ignore_launcher_sigterm": ignore_launcher_sigterm}
    options = {"num_workers": 1, "persistent_workers": True}
    loader = DataLoader(range(100), worker_init_fn=ways[way], **options)
    faulthandler.dump_traceback_later(int(seconds), exit=True)
    for _ in loader:
        raise RuntimeError("an error in the training loop")


if __name__ == "__main__":
    main(*sys.argv[1:])
