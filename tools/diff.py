"""`make diff`: what stages change, as a diff against those they build on.

python -m tools.diff [--from NN] [NN ...]
"""

import argparse
import subprocess

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
