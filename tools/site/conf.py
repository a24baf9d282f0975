"""The settings of Sphinx, which `make site` runs on the repository itself, twice.

The pages are the repository's Markdown files and notebooks. A new stage or page needs
no line here: stages.toml has the order of the notebooks, and docs/NAME.md finds its
place in the sidebar. With the tag `zh`, the site is in Chinese: docs/locale has the
words, paragraph by paragraph, and a paragraph without them is in English.
"""

import json
import os
import sys
from pathlib import Path

from docutils import nodes
from sphinx import addnodes

SITE = Path(__file__).resolve().parent
ROOT = SITE.parents[1]
sys.path.insert(0, str(ROOT))

from harness.stages import parts
from harness.stages import registry

project = "Distributed training in PyTorch"
extensions = ["myst_nb", "sphinx_copybutton", "sphinxext.opengraph"]
root_doc = "README"
exclude_patterns = [".*", "**/.*", "docs/_build", "**.zh-CN.*", "**/mine*", "SKILL.md"]
exclude_patterns += ["data", "runs", "checkpoints", "gpu_results"]
nitpicky = True
smartquotes = False  # otherwise the two hyphens of a flag become a dash
highlight_language = "text"  # of blocks that do not name one: commands, tables

# The notebooks are shown with the outputs that they are stored with.
nb_execution_mode = "off"
nb_merge_streams = True

myst_heading_anchors = 6  # links to headings, by the names that GitHub gives them
myst_enable_extensions = []  # no formulas: MathJax would come from another host

# A button copies code, and of what was typed and printed only what was typed.
copybutton_prompt_text = "$ "
copybutton_line_continuation_character = "\\"
copybutton_selector = (
    "div:not(.output):not(.highlight-diff) > div.highlight pre, div.typed pre"
)

html_theme = "sphinx_book_theme"
html_theme_options = {
    "article_header_end": ["language.html", "article-header-buttons.html"],
    "footer_content_items": [],
    "home_page_in_toc": True,
    "navbar_persistent": [],
    "show_toc_level": 2,
    "use_download_button": False,
}
html_context = {"default_mode": "auto"}  # light or dark, as the reader's system is
html_favicon = str(SITE / "_static/favicon.svg")
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_extra_path = ["index.html"]  # leads to README.html
html_copy_source = False
html_use_index = False
html_search_language = "en"  # not used: _templates/search.html asks Pagefind
templates_path = ["_templates"]

# ---- Chinese -------------------------------------------------------------------------
is_chinese = tags.has("zh")  # noqa: F821, Sphinx defines it
language = "zh_CN" if is_chinese else "en"
html_title = "PyTorch 分布式训练" if is_chinese else project
nb_code_prompt_show = "显示准备代码" if is_chinese else "Show the setup"  # see prepare
nb_code_prompt_hide = "隐藏准备代码" if is_chinese else "Hide the setup"
locale_dirs = ["docs/locale"]
gettext_compact = False  # a catalog for each page
gettext_location = False  # no line numbers, which every edit would change
translation_progress_classes = "untranslated"  # site.css marks these paragraphs

# The address of the site, and of the files that are no pages, which the workflow knows
# (.github/workflows/site.yml). Elsewhere, links to such files lead to copies.
html_baseurl = os.environ.get("SITE_URL", "")
if html_baseurl and is_chinese:
    html_baseurl += "zh_CN/"
FILES = os.environ.get("FILES_URL", "")
ogp_site_url = html_baseurl
ogp_enable_meta_description = True
ogp_social_cards = {"enable": False}

# ---- the order of the pages ----------------------------------------------------------
START = ["docs/running", "your_own_script/README"]
START += ["check_yours/README", "exercises/README"]
FAILS = ["docs/first_aid", "docs/symptoms", "docs/faults"]
LAST = ["recipes/README", "other_libraries/README", "benchmarks/README", "CONTRIBUTING"]


def sidebar():
    """Return {caption: its pages}, those that there are."""
    found = {"Start": START}
    for part, stages in parts().items():
        found[part] = [f"{stage.name}/{stage.name}" for stage in stages]
    docs = [f"docs/{path.stem}" for path in sorted(ROOT.glob("docs/*.md"))]
    docs = [page for page in docs if page not in START + FAILS]
    found |= {"When it fails": FAILS, "Reference": docs + LAST}
    return {caption: [*filter(is_there, pages)] for caption, pages in found.items()}


def is_there(page):
    """Return whether a page is there, and is one of the site."""
    files = [ROOT / f"{page}{end}" for end in (".md", ".ipynb")]
    return "zh-CN" not in page and any(file.is_file() for file in files)


def below(page):
    """Return the pages below another one: those of its folder, if it leads there."""
    folder, _, name = page.rpartition("/")
    if folder in registry() and name == folder:
        return [f"{folder}/{other}" for other in registry()[folder].companions]
    if not folder or name != "README":
        return []
    files = [*ROOT.glob(f"{folder}/*.md"), *ROOT.glob(f"{folder}/*/README.md")]
    pages = [str(file.relative_to(ROOT).with_suffix("")) for file in sorted(files)]
    return [one for one in pages if one != page and is_there(one)]


def toctree(pages, *options):
    """Return the directive that puts pages below this one."""
    lines = [f"/{page}" for page in pages]
    return "\n".join(["", "", "```{toctree}", ":hidden:", *options, "", *lines, "```"])


# ---- what is done to each page -------------------------------------------------------
def prepare(app, page, source):
    """Put the pages below this one, and fold the first cell of a notebook.

    Sphinx calls it with the text of each page, in a list, and reads what is left there.
    """
    more = toctree(below(page)) if below(page) else ""
    if page == root_doc:
        for caption, pages in sidebar().items():
            more += toctree(pages, f":caption: {caption}")
        # the site has this link on each page
        source[0] = source[0].replace("- [中文](README.zh-CN.md)\n", "")
    if app.env.doc2path(page).suffix == ".md":
        source[0] += more
        return
    book = json.loads(source[0])
    setup_cell = next(cell for cell in book["cells"] if cell["cell_type"] == "code")
    if "sys.path.insert(" in "".join(setup_cell["source"]):
        setup_cell["metadata"].setdefault("tags", []).append("hide-input")
    cell = {"cell_type": "markdown", "id": "below", "metadata": {}, "source": more}
    book["cells"].append(cell)
    source[0] = json.dumps(book)


def lead_to_files(app, doctree):
    """Let links lead to the main page of a folder, and to files on GitHub."""
    links = [*doctree.findall(addnodes.pending_xref)]
    for link in [*links, *doctree.findall(addnodes.download_reference)]:
        here = Path(app.env.doc2path(link["refdoc"])).parent
        path = (here / link["reftarget"]).resolve()
        if link["refdomain"] is not None or not path.is_relative_to(ROOT):
            continue
        name = path.relative_to(ROOT).as_posix()
        mains = [f"{name}/README", f"{name}/{path.name}"]
        main = next((page for page in mains if page in app.env.found_docs), None)
        if path.is_dir() and main:
            link["refdomain"], link["reftarget"] = "doc", main
            link["reftargetid"] = None
        elif path.is_dir() and not FILES:
            link.replace_self(link.children)
        elif path.exists() and FILES:
            where = nodes.reference(refuri=f"{FILES}/{name}")
            where += link.children
            link.replace_self(where)


def lay_out(app, doctree):
    """Mark outputs that begin with a command, and name pictures by their headings."""
    for block in doctree.findall(nodes.literal_block):
        if "output" in block["classes"] and block.astext().startswith("$ "):
            block["classes"].append("typed")
    if app.builder.name == "gettext":
        return
    for image in doctree.findall(nodes.image):
        section = image.parent
        while not isinstance(section, nodes.section):
            section = section.parent
        image["alt"] = image.get("alt") or section.next_node(nodes.title).astext()


def setup(app):
    app.connect("source-read", prepare)
    app.connect("doctree-read", lead_to_files)
    app.connect("doctree-read", lay_out)
