"""`make pages`: write what follows from stages.toml and the tests' marks.

These are the lists of stages in README.md and README.zh-CN.md, docs/faults.md, and the
pictures of docs/. `make pages` runs this; tests/test_tools.py fails if one is stale.

python -m tools.pages
"""

from tools import fault_table
from tools import picture
from tools.stages import ROOT
from tools.stages import registry

START, END = "<!-- stages -->\n", "<!-- end of stages -->\n"
FRONT_PAGES = ("README.md", "README.zh-CN.md")


def stage_list(page):
    """Return the list of stages on one of the two front pages, a line each."""
    lines = []
    for name, stage in registry().items():
        says = f"：{stage.teaches_zh}" if "zh" in page else f": {stage.teaches}"
        lines.append(f"- [{name}]({name}/{name}.ipynb){says}\n")
    return "".join(lines)


def pages():
    """Return {path: what its text should be} for the pages, except the pictures.

    Raises ValueError if a front page has no markers around its list.
    """
    found = {fault_table.PAGE: fault_table.page()}
    for page in FRONT_PAGES:
        above, rest = (ROOT / page).read_text().split(START)
        _, below = rest.split(END)
        found[ROOT / page] = above + START + stage_list(page) + END + below
    return found


def main():
    for path, text in pages().items():
        path.write_text(text)
    picture.draw_all()


if __name__ == "__main__":
    main()
