"""`make pages`: write what follows from stages.toml and the tests' marks.

These are the stages in README.md and README.zh-CN.md, docs/faults.md, llms.txt, and
the pictures of docs/. `make pages` runs this; test_tools.py fails if one is stale.

python -m tools.pages
"""

import re
from itertools import pairwise

from harness.stages import ROOT
from harness.stages import notebooks
from harness.stages import parts
from harness.stages import registry
from tools import fault_table
from tools import picture
from tools import zh

START, END = "<!-- stages -->\n", "<!-- end of stages -->\n"
FRONT_PAGES = ("README.md", "README.zh-CN.md")
BOOK = re.compile(
    r"(?<=[*][*]\[Read it as a book\]\()[^)]+|(?<=[*][*]\[当作一本书来读\]\()[^)]+"
)
# A fork that publishes the site, with .github/workflows, writes its address here:
# "https://NAME.github.io/REPOSITORY/". Until then the front pages lead to the notebook.
SITE = ""
LLMS = ROOT / "llms.txt"
HEAD = (
    "# Distributed training in PyTorch",
    "",
    "> From one GPU to several, to a cluster with Slurm, and to models that do not fit "
    "on one GPU: complete scripts, and pages whose claims are run and tested.",
    "",
    "[SKILL.md](SKILL.md) says how to help somebody with it. Messages and faults are "
    "in [docs/symptoms.md](docs/symptoms.md).",
    "",
    "## Questions",
    "",
)


def stage_list(page):
    """Return the stages as one of the two front pages lists them, by parts."""
    chinese, lines = "zh" in page, []
    for part in parts().values():
        title = part[0].part_zh if chinese else part[0].part
        lines.append(f"\n**{title}**\n\n")
        for stage in part:
            says = f"：{stage.teaches_zh}" if chinese else f": {stage.teaches}"
            name = stage.name
            lines.append(f"- [{name}]({name}/{name}.ipynb){says}\n")
    return "".join(lines) + f"\n{builds_on(chinese)}\n"


def builds_on(chinese):
    """Return which stage each builds on, and which a reader can skip."""
    known = [*registry().values()]
    bases = {stage.builds_on for stage in known}
    skipped = [stage.number for stage in known[:-1] if stage.name not in bases]
    others = [
        (stage.number, stage.builds_on[:2])
        for before, stage in pairwise(known)
        if stage.builds_on != before.name
    ]
    if chinese:
        but = "、".join(f"{one} 以 {other} 为基础" for one, other in others)
        skip = f"{' 和 '.join(skipped)} 可以跳过。" if skipped else ""
        return f"除 {but}外，每个阶段都以前一阶段为基础。{skip}"
    but = ", and ".join(f"{one}, which builds on {other}" for one, other in others)
    skip = f" You can skip {' and '.join(skipped)}." if skipped else ""
    return f"Each builds on the one before it, except {but}.{skip}"


def for_assistants():
    """Return llms.txt: what an assistant may read, by the form of llmstxt.org."""
    questions = (ROOT / "docs/questions.md").read_text().splitlines()
    lines = [line for line in questions if line.startswith("- [")]
    lines = [re.sub(r"\]\((?!\.\./)", "](docs/", line) for line in lines]
    lines = [line.replace("](../", "](") for line in lines]
    known = [
        f"- [{s.name}]({s.name}/{s.name}.ipynb): {s.teaches}"
        for s in registry().values()
    ]
    return "\n".join([*HEAD, *lines, "", "## The stages", "", *known, ""])


def pages():
    """Return {path: what its text should be} for the pages, except the pictures.

    Raises ValueError if a front page has no markers around its list.
    """
    found = {fault_table.PAGE: fault_table.page(), LLMS: for_assistants()}
    for page in FRONT_PAGES:
        above, rest = (ROOT / page).read_text().split(START)
        _, below = rest.split(END)
        text = above + START + stage_list(page) + END + below
        first, *_ = notebooks()
        book = SITE or first.relative_to(ROOT).as_posix()
        text = BOOK.sub(book, text)
        chinese = zh.CHINESE in page
        found[ROOT / page] = zh.relinked_front_page(text) if chinese else text
    return found


def main():
    for path, text in pages().items():
        path.write_text(text)
    picture.draw_all()


if __name__ == "__main__":
    main()
