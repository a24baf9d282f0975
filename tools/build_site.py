"""Build the site: the repository's pages and notebooks, each with its scripts.

python -m tools.build_site [FOLDER]

FOLDER is docs/_build by default. It gets the site in `html`, and what Sphinx builds it
from in `pages`: a copy of the files that git knows, with a page for every folder and
for every script in SCRIPT_FOLDERS, and with links from the notebooks to the sections of
the scripts that they show.
"""

import ast
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from os.path import normpath
from os.path import relpath
from pathlib import Path

from nbtools.sections import section_spans
from tools.stages import ROOT
from tools.stages import fail
from tools.stages import known_files
from tools.stages import stages

BUILD = ROOT / "docs/_build"
SETTINGS = "docs/conf.py"  # Sphinx reads it; it is not a page
SUBFOLDERS = ("docs/your_own_script", "recipes/neighbors")  # with a page each
DEMOS = "demos"  # in a stage's folder: the programs that its notebooks show and run
SCRIPT_FOLDERS = [
    *stages(),
    *(f"{stage}/{DEMOS}" for stage in stages()),
    "common",
    "recipes",
    *SUBFOLDERS,
]
LANGUAGES = {".py": "python", ".sbatch": "bash", ".sh": "bash"}


def in_folder(folder, names):
    """Return those of the paths that are directly in a folder, as Path objects."""
    return [path for path in map(Path, names) if path.parent == Path(folder)]


def scripts(folder, names):
    """Return the names of a folder's scripts that are not empty, train.py first."""
    found = [
        path.name
        for path in in_folder(folder, names)
        if path.suffix in LANGUAGES
        and path.as_posix() != SETTINGS
        and (ROOT / path).stat().st_size
    ]
    return sorted(found, key=lambda name: (name != "train.py", name))


def notebooks(stage, names):
    """Return the names of a stage's notebooks, the main one first."""
    found = [path for path in in_folder(stage, names) if path.suffix == ".ipynb"]
    ordered = sorted(found, key=lambda path: (path.stem != stage, path))
    return [path.name for path in ordered]


def plan(names):
    """Return {path in the repository: path of its page}, for files and for folders."""
    page_of = {name: name for name in names if name.endswith(".md") and name[0] != "."}
    page_of["README.md"] = "index.md"
    folders = {name.split("/")[0] for name in names if "/" in name and name[0] != "."}
    page_of |= {folder: f"{folder}/index.md" for folder in {*folders, *SUBFOLDERS}}
    for folder in SCRIPT_FOLDERS:
        for name in scripts(folder, names):
            page_of[f"{folder}/{name}"] = f"{folder}/{name}.md"
    for stage in stages():
        page_of |= {f"{stage}/{n}": f"{stage}/{n}" for n in notebooks(stage, names)}
        page_of[stage] = f"{stage}/{stage}.ipynb"
    return page_of


def relink(text, folder, page_of):
    """Return the text of a page in a folder, with links to pages instead of files."""

    def to_page(link):
        path, mark, anchor = link[1].partition("#")
        page = page_of.get(normpath(Path(folder, path))) if path else None
        return f"]({relpath(page, folder) if page else path}{mark}{anchor})"

    return re.sub(r"\]\(([^()\s:]+)\)", to_page, text)


def toctree(pages, caption=None):
    """Return the lines that put pages below this one, in this order."""
    options = [":hidden:", *([f":caption: {caption}"] if caption else [])]
    return "\n".join(["", "```{toctree}", *options, "", *pages, "```", ""])


def script_page(script):
    """Return the page of a script: all its lines, with the sections as headings."""
    path = Path(script)
    of_stage = path.parent.name in stages()
    title = f"{path.parent.name[:2]} · {path.name}" if of_stage else script
    if path.parent.name == DEMOS:
        title = f"{script[:2]} · {path.name}"
    notebook = f", with [its notebook]({path.parent.name}.ipynb)" if of_stage else ""
    parts = [f"# {title}", "", f"[{script}]({path.name}){notebook}", ""]
    spans = section_spans(script)
    for heading, (first, last) in spans.items():
        parts += [f"## {heading}", ""] if len(spans) > 1 else []
        parts += [
            f"```{{literalinclude}} {path.name}",
            f":language: {LANGUAGES[path.suffix]}",
            f":lines: {first}-{last}",
            ":lineno-match:",
            "```",
            "",
        ]
    return "\n".join(parts)


def summary(name):
    """Return what a script or a page says about itself in its first line."""
    text = (ROOT / name).read_text()
    if name.endswith(".py"):
        return (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    first = re.search("^# (.*)", text, re.MULTILINE)
    return first[1] if first else ""


def folder_page(folder, names, page_of):
    """Return the page of a folder: its texts and scripts, each with its summary."""
    texts = [path.name for path in in_folder(folder, names) if path.suffix == ".md"]
    found = [*sorted(texts), *scripts(folder, names)]
    listed = [f"- [{name}]({name}): {summary(f'{folder}/{name}')}" for name in found]
    below = [n for n in found if page_of.get(f"{folder}/{n}") == f"{folder}/{n}.md"]
    text = "\n".join([f"# {folder}", "", *listed, ""])
    text = relink(text, folder, page_of)
    return text + toctree(f"{name} <{name}>" for name in below) if below else text


def notebook_page(notebook, names, page_of):
    """Return a notebook with links to scripts, and to the sections that it shows."""
    stage = Path(notebook).parent.name
    shows = re.compile(r'lesson\.show(?:_diff)?\([^)]*"(\d\d_\w+)",\s*"([^"]+)"')
    book = json.loads((ROOT / notebook).read_text())
    cells = []

    def add(text):
        cell = {"cell_type": "markdown", "metadata": {}, "source": text}
        cells.append(cell | {"id": f"site-{len(cells):03}"})

    for cell in book["cells"]:
        source = "".join(cell["source"])
        cells.append(cell)
        if cell["cell_type"] == "markdown":
            cell["source"] = relink(source, stage, page_of)
            continue
        links = []
        for shown, title in shows.findall(source):
            first, last = section_spans(f"{shown}/train.py")[title]
            page = f"../{shown}/train.py.md#{title.replace('.', '').replace(' ', '-')}"
            links.append(f"[{shown}/train.py, lines {first} to {last}]({page})")
        if links:
            add(", ".join(links))
    if Path(notebook).stem == stage:
        companions = notebooks(stage, names)[1:]
        beside = scripts(stage, names)
        beside += [f"{DEMOS}/{name}" for name in scripts(f"{stage}/{DEMOS}", names)]
        title, _, text = cells[0]["source"].partition("\n")
        links = ", ".join(f"[{name}]({name}.md)" for name in beside)
        cells[0]["source"] = f"{title}\n\nFiles of this stage: {links}\n{text}"
        add(toctree([*companions, *(f"{name} <{name}>" for name in beside)]))
    return json.dumps(book | {"cells": cells})


def home(page_of):
    """Return what the first page gets in addition to README.md: the order of pages."""
    texts = {name for name in page_of if name.endswith(".md")} - {"README.md"}
    texts = sorted(texts, key=lambda n: (n == "CONTRIBUTING.md", "/" in n, n))
    folders = sorted(name for name in page_of if page_of[name] == f"{name}/index.md")
    return "".join(
        [
            toctree((f"{stage}/{stage}" for stage in stages()), "Stages"),
            toctree((name.removesuffix(".md") for name in texts), "Pages"),
            toctree((f"{folder}/index" for folder in folders), "Folders"),
        ]
    )


def prepare(folder):
    """Fill a new folder with what Sphinx reads."""
    names = known_files()
    page_of = plan(names)
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if not name.endswith((".md", ".ipynb")):
            shutil.copy(ROOT / name, folder / name)
    for name, page in page_of.items():
        if name.endswith(".md"):
            text = relink((ROOT / name).read_text(), Path(name).parent, page_of)
        elif name.endswith(".ipynb"):
            text = notebook_page(name, names, page_of)
        elif Path(name).suffix in LANGUAGES:
            text = script_page(name)
        elif name not in stages():
            text = folder_page(name, names, page_of)
        else:
            continue
        (folder / page).write_text(text)
    with (folder / "index.md").open("a") as first:
        first.write(home(page_of))


def main():
    arguments = sys.argv[1:]
    if len(arguments) > 1 or arguments and arguments[0].startswith("-"):
        fail("usage: python -m tools.build_site [FOLDER]")
    folder = Path(arguments[0]).resolve() if arguments else BUILD
    for package in ("sphinx", "myst_nb", "sphinx_book_theme"):
        if not importlib.util.find_spec(package):
            fail(f"the package {package} is not installed; `make site` installs it")
    if folder == BUILD:
        shutil.rmtree(folder, ignore_errors=True)
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        fail(f"{folder} is not an empty folder")
    try:
        prepare(folder / "pages")
    except subprocess.CalledProcessError as error:
        fail(f"this is not a clone; git says: {error.stderr.splitlines()[0]}")
    except OSError as error:  # the disk is full, the folder cannot be made, no git
        fail(error)
    strict = ["--quiet", "--nitpicky", "--fail-on-warning", "--keep-going"]
    command = [sys.executable, "-m", "sphinx", "-c", ROOT / "docs", *strict]
    done = subprocess.run([*command, folder / "pages", folder / "html"], check=False)
    if done.returncode:
        fail("Sphinx has warnings, see above")
    print(f"open {folder / 'html/index.html'}")


if __name__ == "__main__":
    main()
