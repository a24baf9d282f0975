"""Say which packages are missing, or too old.

python -m tools.missing [NAME ...]

It looks for the named packages, or for all in FILES. Exit code 0 if there are none,
otherwise 2, with one line that says how to install them.
"""

import re
import sys
from importlib import metadata

from tools.stages import ROOT
from tools.stages import fail

FILES = ("requirements.txt", "requirements-dev.txt", "docs/requirements.txt")


def numbers(version):
    """Return the numbers at the start of a version: (2, 11) for "2.11+cpu"."""
    return tuple(map(int, re.match(r"[\d.]*\d", version)[0].split(".")))


def missing(names=()):
    """Return the requirements, such as "torch>=2.11", that this Python lacks."""
    text = "\n".join((ROOT / file).read_text() for file in FILES)
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    found = []
    for line in filter(None, lines):
        name, _, least = line.partition(">=")
        if names and name not in names:
            continue
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            found.append(line)
        else:
            if numbers(installed) < numbers(least):
                found.append(line)
    return found


def main():
    if wanted := missing(sys.argv[1:]):
        quoted = " ".join(f"'{line}'" for line in wanted)
        fail(f"{sys.executable} lacks packages; type: pip install {quoted}")


if __name__ == "__main__":
    main()
