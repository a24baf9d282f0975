"""The settings of Sphinx, which `make site` runs on the repository itself.

The pages are the repository's Markdown files, notebooks and scripts. A new stage needs
no line here: stages.toml has the order of the notebooks. A page docs/NAME.md finds its
place in the sidebar, too. It gets the script _static/NAME.js, if there is one,
and what DATA has for it.
"""

import ast
import base64
import functools
import hashlib
import html
import inspect
import json
import os
import re
import sys
from pathlib import Path

from docutils import nodes
from matplotlib import colors
from sphinx import addnodes
from sphinx.search import SearchEnglish

SITE = Path(__file__).resolve().parent
ROOT = SITE.parents[1]
sys.path.insert(0, str(ROOT))

from harness.stages import notebooks
from harness.stages import parts
from harness.stages import steps
from nbtools import drawing
from tools import diff
from tools import picture
from tools import zh

LANGUAGES = {".py": "python", ".sbatch": "bash", ".sh": "bash"}  # of the scripts

project = html_title = "Distributed training in PyTorch"
extensions = ["myst_nb", "sphinx_copybutton"]
root_doc = "README"
source_suffix = dict.fromkeys(LANGUAGES, "myst-nb")  # see prepare
# What git ignores is not a page. Pages are named without their suffixes, so that a job
# file in demos/ can collide with its script: only the script is a page. The page of
# __init__.py stands for a folder that has no README.
ignored = re.findall("^[^#\n].*", (ROOT / ".gitignore").read_text(), re.MULTILINE)
exclude_patterns = [line.strip("/") for line in ignored]
exclude_patterns += [".*", "**/.*", "docs/*.py", "tools/site", "*/demos/*.sbatch"]
exclude_patterns += ["*/*/__init__.py", "SKILL.md"]
exclude_patterns += [f"{path.parent.name}/__init__.py" for path in ROOT.glob("*/*.md")]
nitpicky = True
smartquotes = False  # otherwise the two hyphens of a flag become a dash
highlight_language = "text"  # of blocks that do not name one: commands, tables

# The notebooks are shown with the outputs that they are stored with.
nb_execution_mode = "off"
nb_merge_streams = True
nb_code_prompt_show = "Show the setup"  # see fold_setup
nb_code_prompt_hide = "Hide the setup"

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
html_search_language = "english-and-chinese"  # see Words
html_search_scorer = str(SITE / "_static/scorer.js")
# A summary needs a server, and the site can also be read from a folder.
html_show_search_summary = False

# The colors of the figures, which Matplotlib names "tab:blue" and so on.
COLORS = {kind: colors.to_hex(name) for kind, name in drawing.COLORS.items()}


def recorded_steps():
    """Return the recorded steps, and the scripts of their stages."""
    recorded = json.loads((SITE / "steps.json").read_text())["steps"]
    scripts = {name: (ROOT / name / "train.py").read_text() for name in recorded}
    return {"recorded": recorded, "scripts": scripts, "colors": COLORS}


# What the scripts of pages read from the element with the id "data".
DATA = {
    "docs/stage_diff": diff.all_pairs,
    "docs/calculator": lambda: {"colors": COLORS},
    "docs/steps": recorded_steps,
}

# ---- which pages there are, and their order ------------------------------------------
BOOK = [root_doc]
BOOK += [str(path.relative_to(ROOT).with_suffix("")) for path in notebooks()]
# The path: the main notebook of each stage. The other notebooks are read by need.
PATH = [root_doc, *(f"{s.name}/{s.name}" for each in parts().values() for s in each)]
START = ["docs/running", "docs/questions", "your_own_script/README"]
START += ["exercises/README"]
FAILS = ["docs/first_aid", "docs/symptoms", "docs/nccl_log", "docs/faults"]
NOT_SEARCHED = ("tests", "tools", "nbtools", "harness")
# The Chinese pages: their front page, the notebooks in the same order, and the others.
CHINESE_BOOK = [f"{page}{zh.CHINESE}" for page in BOOK]
CHINESE_BOOK = [p for p in CHINESE_BOOK if [*ROOT.glob(f"{p}.*")]]
CHINESE_PAGES = [p.relative_to(ROOT).with_suffix("") for p in zh.translations()]
CHINESE_PAGES = [str(page) for page in CHINESE_PAGES if str(page) not in CHINESE_BOOK]


def sidebar():
    """Return {caption: its pages}. Below each page are those of its folder.

    The Chinese pages come last: by that, site.css shows each language its own list.
    """
    found = {"Start": START}
    for part, stages in parts().items():
        numbers = f"{stages[0].number}–{stages[-1].number}"
        pages = [f"{stage.name}/{stage.name}" for stage in stages]
        found[f"{part} · {numbers}"] = pages
    found["When it fails"] = FAILS
    docs = [f"docs/{path.stem}" for path in sorted(ROOT.glob("docs/*.md"))]
    others = [p for p in docs if p not in START + FAILS and not p.endswith(zh.CHINESE)]
    found["Reference"] = [*others, "recipes/README", "other_libraries/README"]
    found["Reference"] += ["benchmarks/README"]
    code = [f"{path.parent.name}/__init__" for path in ROOT.glob("*/__init__.py")]
    code = [page for page in sorted(code) if page != "benchmarks/__init__"]
    found["Code"] = ["CONTRIBUTING", *code]
    found["中文"] = CHINESE_BOOK + CHINESE_PAGES
    return found


def main_page(folder, env):
    """Return the page that stands for a folder, or None."""
    names = [f"{folder}/{name}" for name in ("README", "__init__", folder.name)]
    return next((name for name in names if name in env.found_docs), None)


def toctree(pages, *options):
    """Return the directive that puts pages below this one."""
    lines = [f"/{page}" for page in pages]
    return "\n".join(["", "", "```{toctree}", *options, "", *lines, "```", ""])


def below(main, env):
    """Return the pages below a main page: in reading order, and no scripts."""
    folder = main.rpartition("/")[0]
    pages = [page for page in BOOK if page.startswith(f"{folder}/") and page != main]
    texts = [page for page in sorted(env.found_docs) if page.startswith(f"{folder}/")]
    texts = [page for page in texts if not page.endswith(zh.CHINESE)]
    is_text = [page for page in texts if env.doc2path(page).suffix == ".md"]
    return pages + [page for page in is_text if page != main]


def reference(env):
    """Return the pages that are not of the book, in the order of the sidebar."""
    pages = [page for group in sidebar().values() for page in group]
    pages = [p for p in pages if p not in BOOK and not p.endswith((zh.CHINESE, "__"))]
    return [page for main in pages for page in (main, *below(main, env))]


def neighbors(page, env):
    """Return the pages before and after one, or None.

    The path leads from stage to stage, and ends with the reader's own script. From a
    page beside it one comes back to its stage, or to the next. The pages of reference
    lead to each other, and at the end to the front page.
    """
    name, order = page.removesuffix(zh.CHINESE), [*PATH, "your_own_script/README"]
    if name in BOOK and name not in PATH:
        main = f"{name.partition('/')[0]}/{name.partition('/')[0]}"
        found = [main, order[order.index(main) + 1]]
    elif name in PATH or name in (order := [*reference(env), root_doc]):
        place = order.index(name)
        found = [order[place - 1] if place else None, order[place + 1]]
    else:
        return None, None
    if page != name:  # in Chinese, if there is such a page
        chinese = [f"{each}{zh.CHINESE}" for each in found]
        pairs = zip(chinese, found, strict=True)
        found = [one if one in env.found_docs else other for one, other in pairs]
    return found


def beside(app, page):
    """Return what tells the path from what is beside it, for the end of a page."""
    name = page.removesuffix(zh.CHINESE)
    end = page.removeprefix(name)  # of a page in Chinese
    if name not in BOOK or name == root_doc:
        return ""
    if name not in PATH:
        text = "This page is beside the path, for those who need it."
        text = "本页不在主线上，需要时再读。" if end else text
        return f'<p class="beside">{text}</p>'
    folder = name.partition("/")[0]
    others = [f"{p}{end}" for p in BOOK if p.startswith(f"{folder}/") and p != name]
    links = []
    for other in [each for each in others if each in app.env.found_docs]:
        title = app.builder.render_partial(app.env.titles[other])["title"]
        uri = app.builder.get_relative_uri(page, other)
        links.append(f'<a href="{uri}">{title}</a>')
    if not links:
        return ""
    text = "主线之外，需要时再读：" if end else "Beside the path, by need: "
    return f'<p class="beside">{text}{" · ".join(links)}</p>'


# ---- pages of scripts ----------------------------------------------------------------
@functools.cache
def text_of(path):
    return (ROOT / path).read_text()


def explained_in(path, env):
    """Return the page that leads to a script: the first of its folder that names it."""
    top = Path(path.parts[0])
    name = path.relative_to(top).as_posix()
    pages = [page for page in BOOK if page.startswith(f"{top}/")]
    pages += [page for page in sorted(env.found_docs) if page.startswith(f"{top}/")]
    files = [env.doc2path(page, base=False) for page in pages]
    named = [f for f in files if str(f).endswith((".ipynb", ".md")) and f != path]
    found = next((file for file in named if name in text_of(file)), None)
    return found or env.doc2path(main_page(top, env), base=False)


def script_page(path, text, env):
    """Return the page of a script: all its lines, with its banners as headings."""
    back = os.path.relpath(explained_in(path, env), path.parent)
    page, line = f"# {path}\n\nExplained in [](<{back}>).\n", 1
    for part in re.split("^(?=# ---- )", text, flags=re.MULTILINE):
        if part.startswith("# ---- "):
            page += "\n## " + part.partition("\n")[0].strip("# -")
        page += f"\n~~~~~{{code-block}} {LANGUAGES[path.suffix]}\n"
        page += f":lineno-start: {line}\n\n{part}\n~~~~~\n"
        line += part.count("\n")
    return page


def says(path):
    """Return the first line of a program's docstring, after a colon, or nothing."""
    if path.suffix != ".py":
        return ""
    docstring = ast.get_docstring(ast.parse(text_of(path))) or ""
    line = re.sub(r"^\[\d\d\] ", "", docstring.partition("\n")[0])
    # no markup, except code
    line = re.sub(r"(`[^`]*`)|([*_<>[\]])", lambda m: m[1] or f"\\{m[2]}", line)
    return f": {line}" if line else ""


def script_list(main, env):
    """Return the list of the scripts beside and below a main page, folded."""
    folder = Path(main).parent
    files = [Path(env.doc2path(page, base=False)) for page in env.found_docs]
    files = [f for f in files if folder in f.parents and f.suffix in LANGUAGES]
    files = [f for f in files if f.name != "__init__.py"]
    files.sort(key=lambda f: (len(f.parts), f.suffix, f))
    names = {file: file.relative_to(folder).as_posix() for file in files}
    lines = [f"- [{name}](<{name}>){says(file)}" for file, name in names.items()]
    if not lines or main.endswith("/__init__"):
        return "\n".join(["", *lines])
    summary = f"<summary>All programs of this folder: {len(lines)}</summary>"
    return "\n".join(["", "", "<details>", summary, "", *lines, "", "</details>", ""])


# ---- what is done to each page -------------------------------------------------------
def fold_setup(book):
    """Fold the first cell of a notebook, which imports what the others use."""
    cell = next(cell for cell in book["cells"] if cell["cell_type"] == "code")
    if "sys.path.insert(" in "".join(cell["source"]):
        cell["metadata"].setdefault("tags", []).append("hide-input")


def prepare(app, page, source):
    """Make a page of a script, and end the main page of a folder with its files.

    Sphinx calls it with the text of each page, in a list, and reads what is left there.
    """
    env, path = app.env, Path(app.env.doc2path(page, base=False))
    if path.name == "__init__.py":
        source[0] = f"# {path.parent}\n"
    elif path.suffix in LANGUAGES:
        source[0] = script_page(path, source[0], env)
    # On the site, what a page says to readers on GitHub is not true.
    if path.suffix == ".md":
        source[0] = re.sub(
            r"^On GitHub, this page has no .*?\n\n",
            "",
            source[0],
            flags=re.DOTALL | re.MULTILINE,
        )
    more = ""
    if page == root_doc:
        for caption, pages in sidebar().items():
            more += toctree(pages, ":hidden:", f":caption: {caption}")
    elif len(path.parts) == 2 and page == main_page(path.parent, env):
        more = script_list(page, env)
        if pages := below(page, env):
            more += toctree(pages, ":hidden:")
    if path.suffix == ".ipynb":
        book = json.loads(source[0])
        fold_setup(book)
        if more:
            cell = {"cell_type": "markdown", "id": "files", "metadata": {}}
            book["cells"].append(cell | {"source": more})
        source[0] = json.dumps(book)
    else:
        source[0] += more


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


def ancestors(node):
    """Return the nodes that a node is in, the innermost first."""
    return [node.parent, *ancestors(node.parent)] if node.parent else []


def lay_out(app, doctree):
    """Mark outputs that begin with a command, and tables of prose.

    Such a table gets columns as wide as their texts ask for. On a phone its rows are
    cards, in which each cell begins with the name of its column (see site.css).
    """
    page = app.env.docname
    if app.env.doc2path(page).suffix in LANGUAGES:
        app.env.metadata[page]["orphan"] = True  # no step of the book
    if page.split("/")[0] in NOT_SEARCHED:
        app.env.metadata[page]["nosearch"] = True
    for block in doctree.findall(nodes.literal_block):
        if "output" in block["classes"] and block.astext().startswith("$ "):
            block["classes"].append("typed")
    for image in doctree.findall(nodes.image):
        if not image.get("alt"):  # of a notebook's cell; see with_pictures
            section = next(
                each for each in ancestors(image) if each.tagname == "section"
            )
            title = section.next_node(nodes.title).astext()
            kind = "图" if page.endswith(zh.CHINESE) else "Figure"
            image["alt"] = f"{kind}: {title}"
    for table in doctree.findall(nodes.table):
        names, *rows = [
            [entry.astext() for entry in row.findall(nodes.entry)]
            for row in table.findall(nodes.row)
        ]
        letters = sum(len(text) for row in rows for text in row)
        if letters < 25 * len(names) * len(rows):
            continue
        table["classes"] = ["prose", "colwidths-given"]
        # By the root, so that long texts get more, but not all; 4 is for the narrowest.
        wide = [4 + sum(map(len, column)) ** 0.5 for column in zip(*rows, strict=True)]
        for spec, width in zip(table.findall(nodes.colspec), wide, strict=True):
            spec["colwidth"] = width
        for row in list(table.findall(nodes.row))[1:]:
            for name, entry in zip(names, row, strict=True):
                if name and len(entry):
                    colon = "：" if page.endswith(".zh-CN") else ": "
                    label = nodes.inline(text=f"{name}{colon}", classes=["column"])
                    entry[0].insert(0, label)


def with_pictures(app, page, body):
    """Return a notebook's page whose pictures say what they show.

    And with other pictures for a phone, which it draws.
    """
    book = json.loads(text_of(app.env.doc2path(page)))
    outputs = [one for cell in book["cells"] for one in cell.get("outputs", [])]
    for output in filter(picture.drawn_by, outputs):
        # the name that myst-nb gives to the stored one
        stored = base64.b64decode(output["data"]["image/png"])
        name = hashlib.sha256(stored).hexdigest()
        image = re.search(rf'<img [^>]*src="([^"]*){name}\.png"[^>]*>', body)
        tag, chinese = image[0], "translates" in output["metadata"]
        if not chinese:
            draw, _ = picture.drawn_by(output)
            says = inspect.getdoc(draw).partition("\n")[0]
            says = says.removeprefix("Draw ").rstrip(".")
            says = html.escape(says[:1].upper() + says[1:])
            tag = re.sub(' alt="[^"]*"', lambda _, says=says: f' alt="{says}"', tag)
        if picture.has_narrow(output) and (drawing.chinese_font() or not chinese):
            narrow = picture.png(output, chinese=chinese, narrow=True)
            file = Path(app.outdir, "_images", f"{name}-narrow.png")
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(base64.b64decode(narrow))
            address = f"{image[1]}{file.name}"
            source = f'<source media="(max-width: 600px)" srcset="{address}">'
            tag = f"<picture>{source}{tag}</picture>"
        body = body.replace(image[0], tag)
    return body


def describe(doctree, title):
    """Return the tags by which a search engine or a chat shows a page."""
    first = doctree.next_node(nodes.paragraph) if doctree else None
    text = html.escape(" ".join(first.astext().split())[:200]) if first else project
    names = {'name="description"': text, 'property="og:description"': text}
    names['property="og:title"'] = html.escape(re.sub("<[^>]*>", "", title))
    return "".join(f'<meta {name} content="{each}">' for name, each in names.items())


def complete(app, page, _template, context, doctree):
    """Give a page its neighbors, what describes it, its script and its data."""
    tags = describe(doctree, context.get("title", project))
    context["metatags"] = context.get("metatags", "") + tags
    for key, other in zip(("prev", "next"), neighbors(page, app.env), strict=True):
        context[key] = None
        if other:
            title = app.builder.render_partial(app.env.titles[other])["title"]
            link = app.builder.get_relative_uri(page, other)
            context[key] = {"link": link, "title": title}
    folder, _, name = page.removesuffix(zh.CHINESE).partition("/")
    if folder == "docs" and (SITE / f"_static/{name}.js").is_file():
        app.add_js_file(f"{name}.js", loading_method="defer")
        context["body"] += (
            "<noscript>The rest of this page needs JavaScript.</noscript>"
        )
    if app.env.doc2path(page).suffix == ".ipynb":
        context["body"] = with_pictures(app, page, context["body"])
    if "body" in context:  # which the page of the search has not
        context["body"] += beside(app, page)
    if page in DATA:
        text = json.dumps(DATA[page]()).replace("<", r"\u003c")
        context["body"] += f'<script type="application/json" id="data">{text}</script>'
    if page == "docs/stage_diff":
        for before, after in steps():
            shown = "\n".join(diff.unified(before, after))
            shown = app.builder.highlighter.highlight_block(shown, "diff")
            names = f"{before} → {after}"
            context["body"] += f"<details><summary>{names}</summary>{shown}</details>"


# ---- Chinese -------------------------------------------------------------------------
class Words(SearchEnglish):
    """English words, and of Chinese, which has no spaces, each two characters."""

    lang = "english-and-chinese"
    js_splitter_code = r"""
      function splitQuery(query) {
        const han = /\p{Script=Han}+/gu;
        const found = query.replace(han, " ").match(/[\p{L}\p{N}_]+/gu) || [];
        for (const [run] of query.matchAll(han)) {
          if (run.length < 2) found.push(run);
          for (let n = 0; n + 1 < run.length; n++) found.push(run.slice(n, n + 2));
        }
        return found;
      }
    """

    def split(self, text):
        runs = re.findall(f"{zh.HAN}+", text)
        pairs = [run[n : n + 2] for run in runs for n in range(len(run))]
        return super().split(re.sub(zh.HAN, " ", text)) + pairs


def switch_language(app, page, _template, context, _doctree):
    """Begin a page that there is in both languages with a link to the other one."""
    is_chinese = page.endswith(zh.CHINESE)
    other = page.removesuffix(zh.CHINESE) if is_chinese else page + zh.CHINESE
    if is_chinese:
        context["language"] = zh.CHINESE.strip(".")
    if other in app.env.found_docs:
        link = app.builder.get_relative_uri(page, other)
        english, chinese = "English", f'<a href="{link}" lang="zh-CN">中文</a>'
        if is_chinese:
            english, chinese = f'<a href="{link}" lang="en">English</a>', "中文"
        line = f'<p class="languages">{english} | {chinese}</p>'
        context["body"] = line + context["body"]


def setup(app):
    app.add_search_language(Words)
    app.connect("html-page-context", switch_language)
    app.connect("source-read", prepare)
    app.connect("doctree-read", link_folders)
    app.connect("doctree-read", lay_out)
    app.connect("html-page-context", complete)
