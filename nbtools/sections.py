"""The sections of a stage's script, which its banners divide. Imports nothing large."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BANNER = "# ---- "
HEAD = "docstring and imports"


def sections(stage):
    """Return {title: lines} of a stage's script, in its own order, without banners.

    The part above the first banner is HEAD. No section ends with a blank line.
    """
    text = (ROOT / stage / "train.py").read_text()
    head, *others = text.split(f"\n{BANNER}")
    found = {HEAD: head.rstrip().splitlines()}
    for section in others:
        title, *lines = section.rstrip().splitlines()
        found[title.strip("# -")] = lines
    return found
