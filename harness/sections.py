"""The sections of a script, which its banners divide. Imports nothing large."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BANNER = "# ---- "
HEAD = "docstring and imports"


def sections(name):
    """Return {title: lines} of a script, in its own order, without banners.

    name: a stage, for its train.py, or the path of a file in the repository.
    The part above the first banner is HEAD. No section ends with a blank line.
    """
    path = ROOT / name
    text = (path / "train.py" if path.is_dir() else path).read_text()
    head, *others = text.split(f"\n{BANNER}")
    found = {HEAD: head.rstrip().splitlines()}
    for section in others:
        title, *lines = section.rstrip().splitlines()
        found[title.strip("# -")] = lines
    return found
