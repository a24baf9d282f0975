"""Carry an edit of one stage's script down the chain, by a three-way merge per step.

For each stage that differs from the last commit, `git merge-file` merges that
difference into the next stage, and so on to the last. It stops at a conflict and leaves
git's markers in that script. Resolve them, and continue from that stage.

python -m tools.propagate [STAGE]
"""

import subprocess
import sys
import tempfile

from tools.stages import ROOT
from tools.stages import fail
from tools.stages import stages


def committed(path, root):
    """Return the text of a file at HEAD; None if the file is not in HEAD."""
    arguments = ["git", "show", f"HEAD:{path}"]
    done = subprocess.run(
        arguments, cwd=root, capture_output=True, text=True, check=False
    )
    return done.stdout if done.returncode == 0 else None


def propagate(root, start):
    """Carry the edits of stage `start` and of the later ones down the chain."""
    names = stages(root)
    scripts = [f"{stage}/train.py" for stage in names[names.index(start) :]]
    for script in scripts:
        if "<<<<<<< " in (root / script).read_text():
            fail(f"{script} contains conflict markers; resolve them first")
    for edited, target in zip(scripts, scripts[1:], strict=False):
        base = committed(edited, root)
        if base is None or base == (root / edited).read_text():
            continue
        with tempfile.NamedTemporaryFile("w", suffix=".py") as old:
            old.write(base)
            old.flush()
            labels = ["-L", target, "-L", f"{edited} at HEAD", "-L", edited]
            files = [str(root / target), old.name, str(root / edited)]
            merge = ["git", "merge-file", *labels, *files]
            conflicts = subprocess.run(merge, check=False)
        if conflicts.returncode:
            stage = target.partition("/")[0]
            fail(f"conflict in {target}; resolve it, then make propagate FROM={stage}")
        print(f"{edited} -> {target}")


def main():
    start = sys.argv[1] if sys.argv[1:] else stages()[0]
    if start not in stages():
        fail(f"there is no stage {start}; the stages are {' '.join(stages())}")
    propagate(ROOT, start)


if __name__ == "__main__":
    main()
