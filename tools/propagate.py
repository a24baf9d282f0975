"""Carry an edit of one stage's script down the chain, by a three-way merge per step.

For each stage that differs from the last commit, `git merge-file` puts that difference into the
next stage, and so on to the last. A conflict stops it: that script then holds git's markers, and
once they are resolved the command goes on from there.

python -m tools.propagate
"""

import subprocess
import sys
import tempfile

from tools.stages import ROOT
from tools.stages import stages


def committed(path, root):
    """Return the text of a file at HEAD; None where there is none."""
    done = subprocess.run(
        ["git", "show", f"HEAD:{path}"], cwd=root, capture_output=True, text=True, check=False
    )
    return done.stdout if done.returncode == 0 else None


def main(root=ROOT):
    scripts = [f"{stage}/train.py" for stage in stages(root)]
    for edited, target in zip(scripts, scripts[1:], strict=False):
        base = committed(edited, root)
        if base is None or base == (root / edited).read_text():
            continue
        if "<<<<<<< " in (root / edited).read_text():
            sys.stderr.write(f"propagate.py: error: {edited} still holds a conflict\n")
            return 2
        with tempfile.NamedTemporaryFile("w", suffix=".py") as old:
            old.write(base)
            old.flush()
            labels = ["-L", target, "-L", f"{edited} at HEAD", "-L", edited]
            files = [str(root / target), old.name, str(root / edited)]
            conflicts = subprocess.run(["git", "merge-file", *labels, *files], check=False)
        if conflicts.returncode:
            sys.stderr.write(f"propagate.py: error: {edited} -> {target}: conflict, see the file\n")
            return 2
        print(f"{edited} -> {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
