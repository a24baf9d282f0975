"""Run stage 05's script, and count where a step makes Python wait for the device.

torchrun --standalone --nproc-per-node=2 05_amp/demos/waits_of_a_step.py --amp fp16

The flags are the script's. Steps 4 to 13 are counted, on rank 0.
"""

import collections
import os
import runpy
import sys
import traceback
from pathlib import Path

STAGE = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(STAGE.parent))

from harness.counting import Waits
from harness.counting import between_steps

FIRST, LAST = 3, 13
SCRIPT = str(STAGE / "train.py")


class WaitsByLine(Waits):
    """Counts the waits, and notes the line of the script that each comes from."""

    def __init__(self):
        super().__init__()
        self.lines = collections.Counter()

    def note(self, operation, args, result):
        before = self.count
        super().note(operation, args, result)
        if self.count > before:
            stack = traceback.extract_stack()
            frame = [frame for frame in stack if frame.filename == SCRIPT][-1]
            self.lines[frame.lineno, frame.line] += 1


def end():
    waits.__exit__(None, None, None)
    steps = LAST - FIRST
    print(f"waits per step: {waits.count / steps:g}", flush=True)
    for (_, line), count in sorted(waits.lines.items()):
        print(f"    {count / steps:g} in `{line}`", flush=True)


if os.environ["RANK"] == "0":
    waits = WaitsByLine()
    between_steps(FIRST, LAST, waits.__enter__, end)
sys.argv[0] = SCRIPT
runpy.run_path(SCRIPT, run_name="__main__")
