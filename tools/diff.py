"""`make diff`: what stages change, as a diff against those they build on.

python -m tools.diff [--from NN] [NN ...]
"""

import argparse
import re
import subprocess
from itertools import combinations

from harness.stages import ROOT
from harness.stages import fail
from harness.stages import registry
from harness.stages import stages


def find(text):
    """Return the stage that is named by its number or by the beginning of its name."""
    found = [name for name in stages() if text and name.startswith(text)]
    if len(found) != 1:
        fail(f"there is no stage {text}; the stages are {' '.join(stages())}")
    return found.pop()


def unified(before, after):
    """Return the lines of the diff of two stages' scripts, without its first two."""
    scripts = [f"{name}/train.py" for name in (before, after)]
    done = subprocess.run(
        ["diff", "-u", *scripts], cwd=ROOT, capture_output=True, text=True
    )
    return done.stdout.splitlines()[2:]


def all_pairs():
    """Return the stages' scripts and what differs between any two, for the site.

    A hunk is its first line in each of the two scripts, counted from 1, and the signs
    that its lines begin with, a space, a minus or a plus each.
    """
    hunks = {}
    for before, after in combinations(stages(), 2):
        found = hunks[f"{before} {after}"] = []
        for line in unified(before, after):
            if line.startswith("@@"):
                found.append([*map(int, re.findall(r"[-+](\d+)", line)), ""])
            else:
                found[-1][2] += line[0]
    scripts = {name: (ROOT / name / "train.py").read_text() for name in stages()}
    return {"scripts": scripts, "hunks": hunks}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--from", dest="before", metavar="NN", help="compare with it")
    parser.add_argument("stages", nargs="*", metavar="NN", help="all by default")
    args = parser.parse_args()
    for stage in map(find, args.stages or stages()):
        before = find(args.before) if args.before else registry()[stage].builds_on
        if before:
            scripts = [f"{name}/train.py" for name in (before, stage)]
            subprocess.run(["diff", "-u", "--color=auto", *scripts], cwd=ROOT)


if __name__ == "__main__":
    main()
