"""`make zh-notebooks`: write the notebooks in Chinese, to run, as NAME.zh-CN.ipynb.

git ignores them. A text that docs/locale does not have stays in English.
"""

import json
import re
import sys
from pathlib import Path

from babel.messages import pofile

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from harness.stages import notebooks

CATALOGS = ROOT / "docs/locale/zh_CN/LC_MESSAGES"


def translate(text, known):
    """Return the text of a cell with its paragraphs, items, headings in Chinese."""
    for english in sorted(known, key=len, reverse=True):
        words = r"\s+".join(map(re.escape, english.split()))
        begins = r"(?m)(^[ \t]*(?:[-*] |\d+\. |#+ |> |\| )?|\| )"
        pattern = rf"{begins}(?:{words})(?=\s*(?:$|\|))"
        text = re.sub(pattern, lambda m, new=known[english]: m[1] + new, text)
    return re.sub(r"(\]\([^):]*)\.ipynb", r"\1.zh-CN.ipynb", text)


def main():
    for path in notebooks():
        catalog = CATALOGS / path.relative_to(ROOT).with_suffix(".po")
        known = {}
        if catalog.is_file():
            with catalog.open("rb") as file:
                found = [m for m in pofile.read_po(file) if m.id and not m.fuzzy]
            known = {m.id: m.string for m in found if m.string}
        book = json.loads(path.read_text())
        for cell in book["cells"]:
            if cell["cell_type"] == "markdown":
                cell["source"] = translate("".join(cell["source"]), known)
        text = json.dumps(book, ensure_ascii=False, indent=1)
        path.with_suffix(".zh-CN.ipynb").write_text(f"{text}\n")
    print(f"{len(notebooks())} notebooks: NAME.zh-CN.ipynb")


if __name__ == "__main__":
    main()
