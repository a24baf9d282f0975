"""`make propagate`: carry an edit of a stage's script to those that build on it.

For each stage that differs from the last commit, `git merge-file` merges that
difference into each stage that builds on it, and so on. Where there is a conflict, it
leaves git's markers in that script and goes no further on that branch. Resolve them,
and continue from that stage. A comment that only changes its words replaces the old
one even where the lines around it differ. A stage without the old one has words of its
own, and keeps them.

python -m tools.propagate [NN]
"""

import difflib
import subprocess
import sys
import tempfile

from harness.stages import ROOT
from harness.stages import ancestors
from harness.stages import fail
from harness.stages import stages
from harness.stages import steps
from tools.diff import find


def committed(path, root):
    """Return the text of a file at HEAD; None if the file is not in HEAD."""
    arguments = ["git", "show", f"HEAD:{path}"]
    done = subprocess.run(
        arguments, cwd=root, capture_output=True, text=True, check=False
    )
    return done.stdout if done.returncode == 0 else None


def without_comment(line):
    """Return a line of code without its comment; "" for a line that is a comment."""
    return "" if line.lstrip().startswith("#") else line.partition("  # ")[0].rstrip()


def reword_comments(base, edited, target):
    """Return `base` and `target` with the edits that only change comments' words.

    A stage that does not have the old comment has words of its own, and keeps them.
    """
    old, new = base.splitlines(keepends=True), edited.splitlines(keepends=True)
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    for kind, i, j, k, m in reversed(matcher.get_opcodes()):
        before, after = "".join(old[i:j]), "".join(new[k:m])
        codes = [[*map(without_comment, lines)] for lines in (old[i:j], new[k:m])]
        if kind != "replace" or codes[0] != codes[1]:
            continue
        in_base, in_target = (
            f"\n{text}".count(f"\n{before}") for text in (base, target)
        )
        if in_base == 1 and in_target <= 1:
            old[i:j] = new[k:m]
            target = f"\n{target}".replace(f"\n{before}", f"\n{after}")[1:]
    return "".join(old), target


def merge(edited, target, root):
    """Merge what changed in a script since the last commit into another one.

    Returns whether that worked without a conflict.
    """
    base, text = committed(edited, root), (root / edited).read_text()
    if base is None or base == text:
        return True
    base, merged = reword_comments(base, text, (root / target).read_text())
    (root / target).write_text(merged)
    with tempfile.NamedTemporaryFile("w", suffix=".py") as old:
        old.write(base)
        old.flush()
        labels = ["-L", target, "-L", f"{edited} at HEAD", "-L", edited]
        files = [str(root / target), old.name, str(root / edited)]
        command = ["git", "merge-file", "--zdiff3", *labels, *files]
        done = subprocess.run(command, check=False)
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
    propagate(ROOT, find(sys.argv[1]) if sys.argv[1:] else None)


if __name__ == "__main__":
    main()
