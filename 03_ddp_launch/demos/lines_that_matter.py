"""Print the lines that make your_own_script/before.py run on several GPUs.

python 03_ddp_launch/demos/lines_that_matter.py

It is the difference between before.py and after.py, without comments.
"""

import difflib
import re
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "your_own_script"
COLORS = {"+": "32", "-": "31", " ": "0"}
LEFT_OUT = re.compile(r'[+ -]\s*(#|"""|$)')  # comments, docstrings, empty lines


def code(name):
    """Return a script's lines without the comments at their ends."""
    lines = (FOLDER / name).read_text().splitlines()
    return [re.sub(r"  # .*", "", line) for line in lines]


diff = difflib.unified_diff(code("before.py"), code("after.py"), n=1, lineterm="")
between = ""
for line in list(diff)[3:]:
    if line.startswith("@@"):
        between = "\n"  # an empty line between two hunks
    elif not LEFT_OUT.match(line):
        print(f"{between}\x1b[{COLORS[line[0]]}m{line}\x1b[0m")
        between = ""
