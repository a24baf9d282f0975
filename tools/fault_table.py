"""docs/faults.md: what can go wrong, from the marks `fault` of tests."""

import ast
from pathlib import Path

from harness.stages import ROOT
from harness.stages import first_with
from harness.stages import registry
from harness.stages import span
from harness.stages import with_feature

PAGE = ROOT / "docs/faults.md"
HEAD = """# What the stages survive, and what a failure costs

<!-- `make update` writes this page from the marks of the tests -->

Each row has a test, which makes the fault happen in one of the row's stages, and finds
the words in `this type` in the output. There, `...` stands for anything. The tests run
on CPUs with gloo, and those of Slurm jobs on two nodes that one machine simulates. With
NCCL, a rank that hangs or dies is reported differently: see
[when it hangs](../06_slurm/when_it_hangs.ipynb).

*What is lost* is training. With `--out-dir`, the stages write weights and metrics after
every epoch. They are enough to use the network, but not enough to resume its training.
A run replaces another run's files in that directory, or adds rows to them, so name a
new one for each run.

From stage {checkpoints} on, a run resumes from the latest checkpoint in
`--checkpoint-dir`. It writes one after every epoch and one every `--checkpoint-every`
steps, and removes older ones that are its own. From stage {sharded_checkpoints} on, a
checkpoint is a folder, which all processes write. Torch unpickles its `.metadata`,
which can run any code, so name a directory in which only people whom you trust can
write.

From stage {signals} on, a run that is told to stop finishes the step and writes a
checkpoint. *Nothing* is lost only if the sender leaves
[enough time](../10_preemption/10_preemption.ipynb#the-idea) before it kills the
processes. Otherwise the steps since the last checkpoint are lost. Signals other than
SIGTERM and SIGUSR1, for example that of a terminal that closes, end the run without a
checkpoint.

Two faults that end a run have no row: standard output on a full disk, and a job that is
suspended for longer than `--timeout`. NFS was not tried.

| stages | what happens | what you see | what is lost | test |
|---|---|---|---|---|
"""


def faults():
    """Return a dict per mark: its arguments, and the test's file.

    `stages` are those that have the feature `since` and not the feature `without`. In
    `lost`, {signals} stands for the number of the first stage with that feature. Raises
    ValueError if a test does not take the fixture `fault`.
    """
    found = []
    for path in sorted(ROOT.glob("tests/*/test_*.py")):
        for node in ast.parse(path.read_text()).body:
            for mark in getattr(node, "decorator_list", []):
                named = isinstance(mark, ast.Call) and ast.unparse(mark.func)
                if named == "pytest.mark.fault":
                    row = {
                        word.arg: ast.literal_eval(word.value) for word in mark.keywords
                    }
                    if "fault" not in [each.arg for each in node.args.args]:
                        # then the test does not check the words that the page shows
                        raise ValueError(f"{node.name} does not take `fault`")
                    row["file"] = str(path.relative_to(ROOT))
                    since = [row["since"]] if "since" in row else []
                    without = [row["without"]] if "without" in row else []
                    row["stages"] = with_feature(*since, without=without)
                    found.append(row)
    return found


def page():
    """Return the text of the page, its rows in the order of their first stages."""
    features = ("checkpoints", "signals", "sharded_checkpoints")
    first = {name: registry()[first_with(name)].number for name in features}
    rows = []
    for row in sorted(faults(), key=lambda row: row["stages"]):
        link = f"[{Path(row['file']).stem[5:]}](../{row['file']})"
        cells = [span(row["stages"]), row["what"], row["sees"]]
        cells += [row["lost"].format(**first), link]
        rows.append(f"| {' | '.join(cells)} |\n")
    return HEAD.format(**first) + "".join(rows)
