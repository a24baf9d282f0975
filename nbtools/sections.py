"""The sections of a stage's script, which its banners divide. Imports nothing large."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BANNER = "# ---- "
HEAD = "docstring and imports"


def section_spans(script):
    """Return {title: (first line, last line)} of a script, counted from 1.

    A section begins with its banner and ends with its last line that is not blank. The
    part above the first banner is HEAD.
    """
    lines = (ROOT / script).read_text().splitlines()
    starts = [n for n, line in enumerate(lines, 1) if line.startswith(BANNER)]
    titles = [HEAD, *(lines[n - 1].strip("# -") for n in starts)]
    spans = {}
    for title, first, end in zip(
        titles, [1, *starts], [*starts, len(lines) + 1], strict=True
    ):
        last = max(n for n in range(first, end) if lines[n - 1].strip())
        spans[title] = (first, last)
    return spans


def sections(stage):
    """Return {title: lines} of a stage's script, in its own order, without banners."""
    script = f"{stage}/train.py"
    lines = (ROOT / script).read_text().splitlines()
    return {
        title: lines[first - (title == HEAD) : last]
        for title, (first, last) in section_spans(script).items()
    }
