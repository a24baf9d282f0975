"""Write common/text.txt, the text that the language models are trained on by default.

python -m tools.make_text

It is taken from this tutorial: stage by stage, the Markdown cells of the notebooks and
the lines of the scripts. Most lines of a stage's script are those of the stage before,
so a line or a paragraph that has occurred already is left out. Otherwise the last tenth
of the text, which is for validation, would be a copy of what comes before it.

The file was made once and is frozen: the losses that the notebooks show depend on it.
Running this again replaces it by what the tutorial says now. tests/test_gpt.py holds
its SHA-256.
"""

import json

from tools.stages import ROOT
from tools.stages import known_files
from tools.stages import stages

TEXT = ROOT / "common/text.txt"


def paragraphs(notebook):
    """Return the paragraphs of a notebook's Markdown cells."""
    cells = json.loads((ROOT / notebook).read_text())["cells"]
    sources = ["".join(c["source"]) for c in cells if c["cell_type"] == "markdown"]
    return [part.strip("\n") + "\n" for one in sources for part in one.split("\n\n")]


def parts(stage):
    """Yield the pieces of a stage's text, each with its line break: what it says first.

    The stage's own notebook is before its companions, and train.py before the others.
    """
    names = [name for name in known_files() if name.startswith(f"{stage}/")]
    books = [name for name in names if name.endswith(".ipynb")]
    scripts = [name for name in names if name.endswith(".py")]
    for name in sorted(books, key=lambda name: (f"/{stage}." not in name, name)):
        for paragraph in paragraphs(name):
            yield paragraph
            yield "\n"
    for name in sorted(scripts, key=lambda name: ("/train." not in name, name)):
        yield from (ROOT / name).read_text().splitlines(keepends=True)


def text(names):
    """Return the text of these stages; what occurs twice is there once."""
    seen, found = set(), []
    for part in (part for stage in names for part in parts(stage)):
        blank = not part.strip()
        if blank and (not found or not found[-1].strip()):
            continue  # no two blank lines in a row
        if part not in seen or blank:
            found.append(part)
            seen.add(part)
    return "".join(found)


def main():
    content = text(stages()).encode()
    TEXT.write_bytes(content)
    print(f"{TEXT.relative_to(ROOT)}: {len(content)} bytes")


if __name__ == "__main__":
    main()
