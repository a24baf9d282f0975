"""Write what follows from stages.toml and the tests' marks.

These are the tables of stages in README.md and README.zh-CN.md, docs/faults.md, and
docs/stages.png. `make pages` runs this; tests/test_tools.py fails if a page is stale.

python -m tools.pages
"""

from tools import fault_table
from tools import picture
from tools.stages import ROOT
from tools.stages import registry

START, END = "<!-- stages -->\n", "<!-- end of stages -->\n"
HEADS = {
    "README.md": "| stage | what it teaches | command |",
    "README.zh-CN.md": "| 阶段 | 内容 | 命令 |",
}


def stage_table(page):
    """Return the lines of the table of stages on one of the two front pages."""
    lines = [HEADS[page], "|---|---|---|"]
    for name, stage in registry().items():
        teaches = stage.teaches_zh if "zh" in page else stage.teaches
        link = f"[{stage.number}]({name}/{name}.ipynb)"
        lines.append(f"| {link} | {teaches} | `{stage.command}` |")
    return "".join(f"{line}\n" for line in lines)


def pages():
    """Return {path: what its text should be} for the pages, except the picture.

    Raises ValueError if a front page has no markers around its table.
    """
    found = {fault_table.PAGE: fault_table.page()}
    for page in HEADS:
        above, rest = (ROOT / page).read_text().split(START)
        _, below = rest.split(END)
        found[ROOT / page] = above + START + stage_table(page) + END + below
    return found


def main():
    for path, text in pages().items():
        path.write_text(text)
    picture.draw(picture.PICTURE)


if __name__ == "__main__":
    main()
