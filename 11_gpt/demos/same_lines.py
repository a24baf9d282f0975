"""Find the lines of a script that make it distributed."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# calls of torch.distributed, DDP, the sampler, and whatever asks for a rank
PATTERN = r"\bdist\.|Distributed|[sS]ampler|no_sync|RANK|rank\(|set_device|_process"


def distributed_lines(stage):
    """Return the lines of a stage's script that match PATTERN, in their order."""
    lines = (ROOT / stage / "train.py").read_text().splitlines()
    return [line.strip() for line in lines if re.search(PATTERN, line)]


def calls(lines):
    """Return the names of the functions of torch.distributed that are called."""
    return sorted(set(re.findall(r"\bdist\.\w+(?=\()", "\n".join(lines))))
