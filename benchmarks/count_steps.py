"""Run a script, and count what its steps do: compare.py uses it.

torchrun --standalone --nproc-per-node=2 benchmarks/count_steps.py FILE SCRIPT [FLAGS]

Rank 0 writes to FILE, as JSON: `waits_per_step`; `per_step`, {collective: {"calls",
"bytes"}}; and `gpu_bytes`, the peak of the tensors on its GPU, or None. The counts are
those of steps 3 to 7, in the epoch that warms up. Processes that the script itself
spawns are not seen: then FILE has {}.
"""

import json
import os
import runpy
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.counting import Collectives
from harness.counting import WaitsForDevice
from harness.counting import between_steps

FIRST, LAST = 2, 7  # counted from the end of one step to the end of the other


def count_steps():
    """Have this process count; return the dict that will hold what it counts."""
    waits, collectives = WaitsForDevice(), Collectives()
    steps, counted = LAST - FIRST, {}

    def begin():
        waits.__enter__()
        collectives.__enter__()

    def end():
        collectives.__exit__(None, None, None)
        waits.__exit__(None, None, None)
        counted["waits_per_step"] = waits.count / steps
        counted["per_step"] = {
            name: {key: number / steps for key, number in sums.items()}
            for name, sums in collectives.total().items()
        }
        gpu = torch.cuda.is_initialized()
        counted["gpu_bytes"] = torch.cuda.max_memory_allocated() if gpu else None

    between_steps(FIRST, LAST, begin, end)
    return counted


def main():
    path, *sys.argv = sys.argv[1:]
    counted = count_steps()
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        if os.environ.get("RANK", "0") == "0":
            Path(path).write_text(json.dumps(counted))


if __name__ == "__main__":
    main()
