"""The stages, as stages.toml lists them, for tools and tests: their order, features."""

import dataclasses
import functools
import re
import shlex
import subprocess
import sys
import tomllib
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def fail(message):
    """End a tool with one line on standard error and exit code 2.

    common.args.fail does the same, but importing it imports torch.
    """
    sys.stderr.write(f"{Path(sys.argv[0]).name}: error: {message}\n")
    sys.exit(2)


def known_files(root=ROOT):
    """Return the paths of the files that git tracks or would add, relative to `root`.

    They are strings, sorted. Raises CalledProcessError outside a clone.
    """
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(listed, cwd=root, capture_output=True, text=True, check=True)
    return sorted(name for name in done.stdout.split("\0") if (root / name).is_file())


# ---- the list ------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Stage:
    """An entry of stages.toml, which says what its values mean."""

    name: str
    teaches: str
    command: str
    features: frozenset
    builds_on: str | None = None
    part: str | None = None
    companions: tuple = ()
    plain_command: str | None = None

    @property
    def number(self):
        """The two digits that the name begins with."""
        return self.name[:2]

    @property
    def commands(self):
        """The commands that a reader can type: the one to show, then the plain one."""
        return (
            [self.command, self.plain_command] if self.plain_command else [self.command]
        )


@functools.cache
def registry(root=ROOT):
    """Return {name: Stage}, in order.

    Raises TypeError for a key without a meaning, and ValueError for a stage that builds
    on none of those before it.
    """
    found = {}
    for entry in tomllib.loads((root / "stages.toml").read_text())["stage"]:
        stage = Stage(**{**entry, "features": frozenset(entry["features"])})
        if stage.builds_on not in (None, *found):
            raise ValueError(f"{stage.name} builds on {stage.builds_on}: not before it")
        found[stage.name] = stage
    return found


def stages(root=ROOT):
    """Return the names of the stages, in order."""
    return list(registry(root))


def features(stage):
    """Return the set of a stage's features."""
    return registry()[stage].features


def with_feature(*wanted, without=()):
    """Return the stages that have all the features `wanted`, and none of `without`.

    Raises ValueError for a feature that no stage has.
    """
    known = set().union(*map(features, stages()))
    if unknown := {*wanted, *without} - known:
        raise ValueError(f"no stage has these features: {sorted(unknown)}")
    return [
        stage
        for stage in stages()
        if features(stage).issuperset(wanted) and features(stage).isdisjoint(without)
    ]


def notebooks():
    """Return the paths of the stages' notebooks, those that exist, in reading order."""
    paths = [
        ROOT / stage.name / f"{name}.ipynb"
        for stage in registry().values()
        for name in (stage.name, *stage.companions)
    ]
    return [path for path in paths if path.is_file()]


def parts():
    """Return {part of the book: its stages}, in order."""
    found, part = {}, None
    for stage in registry().values():
        part = stage.part or part
        found.setdefault(part, []).append(stage)
    return found


def first_with(*wanted):
    """Return the first stage that has these features: it explains the last of them."""
    return with_feature(*wanted)[0]


def steps(root=ROOT):
    """Return (what it builds on, the stage) for each stage but the first."""
    known = registry(root).values()
    return [(each.builds_on, each.name) for each in known if each.builds_on]


def ancestors(stage, root=ROOT):
    """Return the stages that a stage builds on, directly or not, the nearest first."""
    found = []
    while before := registry(root)[stage].builds_on:
        found.append(before)
        stage = before
    return found


def reference(stage):
    """Return the first stage that trains on the same data: the others must equal it."""
    return first_with("text" if "text" in features(stage) else "images")


def span(names):
    """Return some stages as words: "03", "03, from 06 on", "all"."""
    numbers = [registry()[name].number for name in stages()]
    places = sorted(stages().index(name) for name in names)
    parts = []
    for _, run in groupby(enumerate(places), lambda pair: pair[1] - pair[0]):
        run = [place for _, place in run]
        first, last = numbers[run[0]], numbers[run[-1]]
        if last == numbers[-1]:
            parts.append("all" if first == numbers[0] else f"from {first} on")
        else:
            parts.append(first if first == last else f"{first} to {last}")
    return ", ".join(parts)


# ---- commands ------------------------------------------------------------------------
def plain_command(stage, processes=2):
    """Return the command that runs a stage on any machine, as it is typed.

    processes: how many it starts, if that can be chosen; None to leave that to it.
    """
    count = rf"\1={processes}" if processes else ""
    plain = registry()[stage].commands[-1]
    return re.sub(r"(--nproc(-per-node)?)=\d+", count, plain)


def launcher(stage):
    """Return the program that a stage's plain command starts: python or torchrun."""
    return plain_command(stage).split()[0]


def command(stage, processes=1, root=ROOT):
    """Return a stage's plain command as words, with its script's full path."""
    return [
        str(Path(root, word)) if word.endswith(".py") else word
        for word in shlex.split(plain_command(stage, processes))
    ]
