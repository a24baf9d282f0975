"""Write docs/faults.md: what may go wrong, from the marks `fault` of the tests that make it happen.

python -m tools.fault_table
"""

import ast

from tools.stages import ROOT

PAGE = ROOT / "docs/faults.md"
HEAD = """# What may go wrong, and what you see then

Every row is produced by a test. It makes this happen, waits for the end of the run (or for it to
go on) no longer than the seconds say, and looks on the screen for the words in `this type`, where
`...` stands for anything. The seconds leave room for two cores that are busy with other tests; by
itself most of this takes a few. `python -m tools.fault_table` writes this page from the marks
of the tests.

What is lost is training. With `--out-dir` the stages write weights and figures after each epoch: enough
to use a network, and not enough to go on with its training. Stage 09 goes on from its last checkpoint
(`--checkpoint-dir`), of which there is one per epoch, and one every `--checkpoint-every` steps.

| stages | what happens | what you see | within | what is lost | test |
|---|---|---|---|---|---|
"""


def faults():
    """Return a dict for each mark: what it says, and the test's file, name and arguments."""
    found = []
    for path in sorted((ROOT / "tests").glob("test_*.py")):
        for node in ast.parse(path.read_text()).body:
            for mark in getattr(node, "decorator_list", []):
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.fault":
                    row = {word.arg: ast.literal_eval(word.value) for word in mark.keywords}
                    arguments = [argument.arg for argument in node.args.args]
                    found.append(row | {"file": path.name, "test": node.name, "takes": arguments})
    return found


def page():
    """Return the text of the page, its rows in the order of the stages."""
    rows = []
    for row in sorted(faults(), key=lambda row: row["stages"]):
        link = f"[{row['file'][5:-3]}](../tests/{row['file']})"
        cells = (row["stages"], row["what"], row["sees"], f"{row['seconds']} s", row["lost"], link)
        rows.append(f"| {' | '.join(cells)} |\n")
    return HEAD + "".join(rows)


def main():
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
