"""Writes what follows from stages.toml and the tests' marks.

These are the stages in README.md, docs/faults.md and the pictures of docs/.
test_tools.py fails if one is stale.

python -m tools.pages
"""

from itertools import pairwise

from harness.stages import ROOT
from harness.stages import parts
from harness.stages import registry
from tools import fault_table
from tools import picture

START, END = "<!-- stages -->\n", "<!-- end of stages -->\n"
README = ROOT / "README.md"


def stage_list():
    """Return the stages as README.md lists them, by parts."""
    lines = []
    for part, stages in parts().items():
        lines.append(f"\n**{part}**\n\n")
        for stage in stages:
            link = f"[{stage.name}]({stage.name}/{stage.name}.ipynb)"
            lines.append(f"- {link}: {stage.teaches}\n")
    return "".join(lines) + f"\n{builds_on()}\n"


def builds_on():
    """Return which stage each builds on, and which a reader can skip."""
    known = [*registry().values()]
    bases = {stage.builds_on for stage in known}
    skipped = [stage.number for stage in known[:-1] if stage.name not in bases]
    others = [
        f"{stage.number}, which builds on {stage.builds_on[:2]}"
        for before, stage in pairwise(known)
        if stage.builds_on != before.name
    ]
    skip = f" You can skip {' and '.join(skipped)}." if skipped else ""
    return f"Each builds on the one before it, except {', and '.join(others)}.{skip}"


def pages():
    """Return {path: what its text should be} for the pages, except the pictures.

    Raises ValueError if README.md has no markers around its list.
    """
    above, rest = README.read_text().split(START)
    _, below = rest.split(END)
    readme = above + START + stage_list() + END + below
    return {fault_table.PAGE: fault_table.page(), README: readme}


def main():
    for path, text in pages().items():
        path.write_text(text)
    picture.draw_all()


if __name__ == "__main__":
    main()
