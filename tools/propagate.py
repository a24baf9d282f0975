"""`make propagate`: carry an edit of a stage's script to those that build on it.

For each stage that differs from the last commit, `git merge-file` merges that
difference into each stage that builds on it, and so on. Where there is a conflict, it
leaves git's markers in that script and goes no further on that branch. Resolve them,
and continue from that stage.

python -m tools.propagate [STAGE]
"""

import subprocess
import sys
import tempfile

from tools.stages import ROOT
from tools.stages import ancestors
from tools.stages import fail
from tools.stages import stages
from tools.stages import steps


def committed(path, root):
    """Return the text of a file at HEAD; None if the file is not in HEAD."""
    arguments = ["git", "show", f"HEAD:{path}"]
    done = subprocess.run(
        arguments, cwd=root, capture_output=True, text=True, check=False
    )
    return done.stdout if done.returncode == 0 else None


def merge(edited, target, root):
    """Merge what changed in a script since the last commit into another one.

    Returns whether that worked without a conflict.
    """
    base = committed(edited, root)
    if base is None or base == (root / edited).read_text():
        return True
    with tempfile.NamedTemporaryFile("w", suffix=".py") as old:
        old.write(base)
        old.flush()
        labels = ["-L", target, "-L", f"{edited} at HEAD", "-L", edited]
        files = [str(root / target), old.name, str(root / edited)]
        done = subprocess.run(["git", "merge-file", *labels, *files], check=False)
    if done.returncode == 0:
        print(f"{edited} -> {target}")
    return done.returncode == 0


def propagate(root, start=None):
    """Carry the edits of stage `start`, or of all, to the stages that build on it."""
    families = {stage: {stage, *ancestors(stage, root)} for stage in stages(root)}
    chosen = [stage for stage in families if start is None or start in families[stage]]
    for stage in chosen:
        if "<<<<<<< " in (root / stage / "train.py").read_text():
            fail(f"{stage}/train.py contains conflict markers; resolve them first")
    conflicts = []
    for before, after in steps(root):
        if before not in chosen or families[before] & {*conflicts}:
            continue
        if not merge(f"{before}/train.py", f"{after}/train.py", root):
            conflicts.append(after)
    if conflicts:
        commands = ", ".join(f"make propagate FROM={stage}" for stage in conflicts)
        fail(f"conflict in {', '.join(conflicts)}; resolve it, then {commands}")


def main():
    start = sys.argv[1] if sys.argv[1:] else None
    if start not in (None, *stages()):
        fail(f"there is no stage {start}; the stages are {' '.join(stages())}")
    propagate(ROOT, start)


if __name__ == "__main__":
    main()
