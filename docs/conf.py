"""The settings of Sphinx, which `make site` runs on the repository itself.

The pages are the repository's Markdown files, notebooks and scripts. A new stage needs
no line here: its folder is found by its name, and all its files are listed below its
notebook.
"""

import json
import re
from pathlib import Path

from sphinx import addnodes

ROOT = Path(__file__).resolve().parents[1]
LANGUAGES = {".py": "python", ".sbatch": "bash", ".sh": "bash"}  # of the scripts

project = html_title = "Distributed training in PyTorch"
extensions = ["myst_nb"]
root_doc = "README"
source_suffix = dict.fromkeys(LANGUAGES, "myst-nb")  # see prepare
# What git ignores is not a page. Pages are named without their suffixes, so that a job
# file in demos/ can collide with its script: only the script is a page. The page of
# __init__.py stands for a folder that has no README.
ignored = re.findall("^[^#\n].*", (ROOT / ".gitignore").read_text(), re.MULTILINE)
exclude_patterns = [line.strip("/") for line in ignored]
exclude_patterns += [".*", "**/.*", "docs/conf.py", "*/demos/*.sbatch"]
exclude_patterns += [f"{path.parent.name}/__init__.py" for path in ROOT.glob("*/*.md")]
nitpicky = True
smartquotes = False  # otherwise the two hyphens of a flag become a dash

# The notebooks are shown with the outputs that they are stored with.
nb_execution_mode = "off"
nb_merge_streams = True
nb_render_image_options = {"alt": "what the cell above draws"}

myst_heading_anchors = 6  # links to headings, by the names that GitHub gives them
myst_enable_extensions = []  # no formulas: MathJax would come from another host

html_theme = "sphinx_book_theme"
html_theme_options = {
    # Each page lists the files of its own folder alone. The others would be a quarter
    # of the site, and two thirds of the time that building it takes.
    "collapse_navbar": True,
    "footer_content_items": [],
    "home_page_in_toc": True,
    "navbar_persistent": [],
    "show_toc_level": 2,
    "use_download_button": False,
}
html_context = {"default_mode": "auto"}  # light or dark, as the reader's system is
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_extra_path = ["index.html"]  # leads to README.html
html_copy_source = False
html_use_index = False
# A summary needs a server, and the site can also be read from a folder.
html_show_search_summary = False

# The pages in the sidebar, by caption. Below each of them are the files of its folder.
HOME = {
    "Stages": "[0-9][0-9]_*/[0-9][0-9]_*",
    "Pages": "docs/**\nyour_own_script/*\n*/README\nREADME.zh-CN\nCONTRIBUTING",
    "Code": "*/__init__",
}


def main_page(folder, env):
    """Return the page that stands for a folder, or None."""
    names = [f"{folder}/{name}" for name in ("README", "__init__", folder.name)]
    return next((name for name in names if name in env.found_docs), None)


def toctree(lines, *options):
    """Return the directive that puts pages below this one."""
    return "\n".join(["", "", "```{toctree}", *options, "", lines, "```", ""])


def script_page(path, text):
    """Return the page of a script: all its lines, with its banners as headings."""
    page, line = f"# {path}\n", 1
    for part in re.split("^(?=# ---- )", text, flags=re.MULTILINE):
        if part.startswith("# ---- "):
            page += "\n## " + part.partition("\n")[0].strip("# -")
        page += f"\n~~~~~{{code-block}} {LANGUAGES[path.suffix]}\n"
        page += f":lineno-start: {line}\n\n{part}\n~~~~~\n"
        line += part.count("\n")
    return page


def files_page(main, env):
    """Return the list of the files beside and below a main page, notebooks first."""
    folder = Path(main).parent
    pages = {Path(env.doc2path(name, base=False)): name for name in env.found_docs}
    files = [f for f in pages if folder in f.parents and pages[f] != main]
    lines = [
        f"{file.relative_to(folder)} </{pages[file]}>"
        if file.suffix in LANGUAGES
        else f"/{pages[file]}"  # with the page's own title
        for file in sorted(files, key=lambda f: (len(f.parts), f.suffix, f))
    ]
    return toctree("\n".join(lines), ":caption: Files", ":maxdepth: 1")


def prepare(app, page, source):
    """Make a page of a script, and end the main page of a folder with its files.

    Sphinx calls it with the text of each page, in a list, and reads what is left there.
    """
    path = Path(app.env.doc2path(page, base=False))
    if path.name == "__init__.py":
        source[0] = f"# {path.parent}"
    elif path.suffix in LANGUAGES:
        source[0] = script_page(path, source[0])
    if page == root_doc:
        for caption, lines in HOME.items():
            source[0] += toctree(lines, ":glob:", ":hidden:", f":caption: {caption}")
    elif len(path.parts) == 2 and page == main_page(path.parent, app.env):
        files = files_page(page, app.env)
        if path.suffix == ".ipynb":
            book = json.loads(source[0])
            cell = {"cell_type": "markdown", "id": "files", "metadata": {}}
            book["cells"].append(cell | {"source": files})
            source[0] = json.dumps(book)
        else:
            source[0] += files


def link_folders(app, doctree):
    """Let a link to a folder lead to its main page; without one it is plain text."""
    for link in list(doctree.findall(addnodes.pending_xref)):
        here = Path(app.env.doc2path(link["refdoc"])).parent
        folder = (here / link["reftarget"]).resolve()
        if link["refdomain"] is None and folder.is_dir():
            if page := main_page(folder.relative_to(ROOT), app.env):
                link["refdomain"], link["reftarget"] = "doc", page
                link["reftargetid"] = None
            else:
                link.replace_self(link.children)


def setup(app):
    app.connect("source-read", prepare)
    app.connect("doctree-read", link_folders)
