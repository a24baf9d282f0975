"""Build the repository as a site: its pages, its notebooks and, beside each, its script.

python -m tools.build_site [FOLDER]

FOLDER (docs/_build, unless it is given) gets the site in `html`, and in `pages` what Sphinx makes it
from: a copy of the files that git knows, with a page for every script of the stages and of common/,
one for every folder, and in the notebooks links to the scripts' lines.
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

from tools.stages import ROOT
from tools.stages import stages

BUILD = ROOT / "docs/_build"
LANGUAGES = {".py": "python", ".sbatch": "bash", ".sh": "bash"}
BANNER = "# ---- "  # as in nbtools/lesson.py, which would import torch for it
HEAD = "docstring and imports"


def fail(line):
    """End the program with a line that says why, and exit code 2."""
    print(f"build_site.py: error: {line}", file=sys.stderr)
    sys.exit(2)


def known_files():
    """Return the paths of the files that git knows or would add, as text, from the root."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        fail(f"this is no clone of the repository; git says: {done.stderr.splitlines()[0]}")
    return sorted(name for name in done.stdout.split("\0") if (ROOT / name).is_file())


def scripts(folder, names):
    """Return the names of a folder's scripts, but for empty ones; train.py is the first."""
    paths = [Path(name) for name in names if Path(name).parent == Path(folder)]
    paths = [path for path in paths if path.suffix in LANGUAGES and (ROOT / path).stat().st_size]
    return sorted((path.name for path in paths), key=lambda name: (name != "train.py", name))


def plan(names):
    """Return {path in the repository: path of its page}, for files and for folders."""
    page_of = {name: name for name in names if name.endswith(".md") and name[0] != "."}
    page_of["README.md"] = "index.md"
    folders = {name.split("/")[0] for name in names if "/" in name and name[0] != "."}
    page_of |= {folder: f"{folder}/index.md" for folder in folders}
    for folder in [*stages(), "common"]:
        page_of |= {f"{folder}/{name}": f"{folder}/{name}.md" for name in scripts(folder, names)}
    for stage in stages():
        page_of[stage] = page_of[f"{stage}/{stage}.ipynb"] = f"{stage}/{stage}.ipynb"
    return page_of


def relink(text, folder, page_of):
    """Return the text of a page in a folder, with links to pages where it has some to files."""

    def to_page(link):
        path, mark, anchor = link[1].partition("#")
        page = page_of.get(normpath(Path(folder, path))) if path else None
        return f"]({relpath(page, folder) if page else path}{mark}{anchor})"

    return re.sub(r"\]\(([^()\s:]+)\)", to_page, text)


def toctree(pages, caption=None):
    """Return the lines that put pages below this one, in this order."""
    options = [":hidden:", *([f":caption: {caption}"] if caption else [])]
    return "\n".join(["", "```{toctree}", *options, "", *pages, "```", ""])


def sections(script):
    """Return {title: (first line, last line)} of a script, cut as nbtools/lesson.py cuts it."""
    lines = (ROOT / script).read_text().splitlines()
    starts = [n for n, line in enumerate(lines, 1) if line.startswith(BANNER)]
    titles = [HEAD, *(lines[n - 1].strip("# -") for n in starts)]
    spans = zip([1, *starts], [*starts, len(lines) + 1], strict=True)
    return {
        title: (first, max(n for n in range(first, end) if lines[n - 1].strip()))
        for title, (first, end) in zip(titles, spans, strict=True)
    }


def script_page(script):
    """Return the page of a script: all its lines, under the headings of its sections."""
    path = Path(script)
    of_stage = path.parent.name in stages()
    title = f"{path.parent.name[:2]} · {path.name}" if of_stage else script
    notebook = f", beside [its notebook]({path.parent.name}.ipynb)" if of_stage else ""
    parts = [f"# {title}", "", f"[{script}]({path.name}){notebook}", ""]
    cut = sections(script)
    for title, (first, last) in cut.items():
        parts += [f"## {title}", ""] if len(cut) > 1 else []
        parts += [f"```{{literalinclude}} {path.name}", f":language: {LANGUAGES[path.suffix]}"]
        parts += [f":lines: {first}-{last}", ":lineno-match:", "```", ""]
    return "\n".join(parts)


def summary(name):
    """Return what a script or a page says of itself in its first line."""
    text = (ROOT / name).read_text()
    if name.endswith(".py"):
        return (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    first = re.search("^# (.*)", text, re.MULTILINE)
    return first[1] if first else ""


def folder_page(folder, names, page_of):
    """Return the page of a folder: its scripts and texts, and what each is for."""
    texts = sorted(name for name in names if re.fullmatch(rf"{folder}/[^/]+\.md", name))
    found = [*texts, *(f"{folder}/{name}" for name in scripts(folder, names))]
    listed = [f"- [{Path(name).name}]({Path(name).name}): {summary(name)}" for name in found]
    below = [Path(name).name for name in found if page_of.get(name) == f"{name}.md"]
    text = "\n".join([f"# {folder}", "", *listed, ""])
    text = relink(text, folder, page_of)
    return text + toctree(f"{name} <{name}>" for name in below) if below else text


def notebook_page(notebook, names, page_of):
    """Return a stage's notebook with links to its scripts, and to the sections that it shows."""
    stage = Path(notebook).parent.name
    beside = scripts(stage, names)
    shows = re.compile(r'lesson\.show(?:_diff)?\([^)]*"(\d\d_\w+)",\s*"([^"]+)"')
    book = json.loads((ROOT / notebook).read_text())
    cells = []

    def add(text):
        name = f"site-{len(cells):03}"
        cells.append({"cell_type": "markdown", "id": name, "metadata": {}, "source": text})

    for cell in book["cells"]:
        source = "".join(cell["source"])
        cells.append(cell)
        if cell["cell_type"] == "markdown":
            cell["source"] = relink(source, stage, page_of)
        elif shown := shows.search(source):
            script, title = f"{shown[1]}/train.py", shown[2]
            first, last = sections(script)[title]
            slug = title.replace(".", "").replace(" ", "-")
            add(f"[{script}, lines {first} to {last}](../{script}.md#{slug})")
    title, _, text = cells[0]["source"].partition("\n")
    links = ", ".join(f"[{name}]({name}.md)" for name in beside)
    cells[0]["source"] = f"{title}\n\nFiles of this stage: {links}\n{text}"
    add(toctree(f"{name} <{name}>" for name in beside))
    return json.dumps(book | {"cells": cells})


def home(page_of):
    """Return what the first page gets besides the README: the order of all pages."""
    texts = {name for name in page_of if name.endswith(".md")} - {"README.md"}
    texts = sorted(texts, key=lambda name: (name == "CONTRIBUTING.md", "/" in name, name))
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
        target = folder / page
        if name.endswith(".md"):
            target.write_text(relink((ROOT / name).read_text(), Path(name).parent, page_of))
        elif name.endswith(".ipynb"):
            target.write_text(notebook_page(name, names, page_of))
        elif Path(name).suffix in LANGUAGES:
            target.write_text(script_page(name))
        elif name not in stages():
            target.write_text(folder_page(name, names, page_of))
    with (folder / "index.md").open("a") as first:
        first.write(home(page_of))


def main():
    arguments = sys.argv[1:]
    if len(arguments) > 1 or arguments and arguments[0].startswith("-"):
        fail("use: python -m tools.build_site [FOLDER]")
    folder = Path(arguments[0]).resolve() if arguments else BUILD
    for package in ("sphinx", "myst_nb", "sphinx_book_theme"):
        if not importlib.util.find_spec(package):
            fail(f"the package {package} is missing; `make site` installs it")
    if folder == BUILD:
        shutil.rmtree(folder, ignore_errors=True)
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        fail(f"{folder} is no empty folder")
    try:
        prepare(folder / "pages")
    except OSError as error:  # the disk is full, the folder cannot be made, there is no git
        fail(error)
    strict = ["--quiet", "--nitpicky", "--fail-on-warning", "--keep-going"]
    command = ["-m", "sphinx", "-c", ROOT / "docs", *strict, folder / "pages", folder / "html"]
    if subprocess.run([sys.executable, *command], check=False).returncode:
        fail("Sphinx has warnings, see above")
    print(f"open {folder / 'html/index.html'}")


if __name__ == "__main__":
    main()
