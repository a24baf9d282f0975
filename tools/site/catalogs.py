"""Checks the Chinese catalogs for what Sphinx does not say, or not where it stands.

Each translation has the inline code and the links of its English, and does not begin as
a list or quotation, because Sphinx would show the English in its place. What is fuzzy
is not shown, and not checked. Prints FILE:LINE: PROBLEM; the exit code is 1 if any.

python tools/site/catalogs.py
"""

import re
import sys
from collections import Counter
from pathlib import Path

from babel.messages import pofile

FOLDER = Path("docs/locale/zh_CN/LC_MESSAGES")
KEPT = {"inline code": r"``.+?``|`[^`]+`", "link": r"(?<=\]\()[^()\s]+(?=[^()]*\))"}
SYNTAX = r'(#.*|((msgid|msgstr) )?"([^"\\]|\\.)*")?'  # of a line; Babel takes more
BEGINS = r"(\d+[.)]|[-+*>]|#+) "


def problems(path):
    """Yield (line, what is wrong) for a catalog."""
    lines = path.read_text().split("\n")
    wrong = [n for n, line in enumerate(lines, 1) if not re.fullmatch(SYNTAX, line)]
    if wrong:
        yield from ((n, f"syntax error: {lines[n - 1][:40]}") for n in wrong)
        return
    try:
        messages = pofile.read_po(lines, abort_invalid=True)
    except pofile.PoFileError as error:
        yield error.lineno + 1, error
        return
    for message in messages:
        english, chinese = message.id, message.string
        if not english or not chinese or message.fuzzy:
            continue
        for kind, pattern in KEPT.items():
            wanted, found = (
                Counter(re.findall(pattern, text)) for text in (english, chinese)
            )
            yield from ((message.lineno, f"no {kind} {one}") for one in wanted - found)
            if kind == "link":
                new = found - wanted
                yield from ((message.lineno, f"not in English: {one}") for one in new)
        if re.match(BEGINS, chinese) and not re.match(BEGINS, english):
            yield message.lineno, f"begins as a list: {chinese[:20]}"


def main():
    found = [
        f"{path}:{line}: {wrong}"
        for path in sorted(FOLDER.rglob("*.po"))
        for line, wrong in problems(path)
    ]
    sys.exit("\n".join(found) or 0)


if __name__ == "__main__":
    main()
