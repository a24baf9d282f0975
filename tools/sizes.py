"""`make sizes`: print how long scripts, notebooks, pages and recipes are.

Lines are all lines of a file. A stage adds and removes lines of the script that it
builds on, as `make diff` shows. The words of a notebook are those of its text cells.
"""

import difflib
import json

from harness.stages import ROOT
from harness.stages import known_files
from harness.stages import notebooks
from harness.stages import registry


def lines(path):
    return (ROOT / path).read_text().splitlines()


def changed_lines(before, after):
    """Return how many lines are added, and removed, between two lists of lines."""
    diff = list(difflib.unified_diff(before, after, n=0, lineterm=""))[2:]
    return tuple(sum(line[0] == sign for line in diff) for sign in "+-")


def words(notebook):
    """Return the number of words in a notebook's text cells."""
    cells = json.loads(notebook.read_text())["cells"]
    text = ["".join(c["source"]) for c in cells if c["cell_type"] == "markdown"]
    return len(" ".join(text).split())


def main():
    print(f"{'stage':40}  lines  added  removed")
    for name, stage in registry().items():
        script, base = lines(f"{name}/train.py"), stage.builds_on
        changed = changed_lines(lines(f"{base}/train.py"), script) if base else ("", "")
        print(f"{name:40}{len(script):7}{changed[0]:7}{changed[1]:9}")
    print(f"\n{'notebook':58}  words")
    for path in notebooks():
        print(f"{path.relative_to(ROOT)!s:58}{words(path):7}")
    print(f"\n{'page or recipe':58}  lines  words")
    for name in sorted(known_files()):
        if name.endswith(".md") or name.startswith("recipes/") and name.endswith(".py"):
            text = (ROOT / name).read_text()
            print(f"{name:58}{len(text.splitlines()):7}{len(text.split()):7}")


if __name__ == "__main__":
    main()
