"""The site: built without a warning, without dead links, and complete in a browser."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

from tools.build_site import notebooks
from tools.build_site import scripts
from tools.stages import ROOT
from tools.stages import known_files
from tools.stages import stages

STAGES = stages()
WINDOWS = {"phone": (390, 844), "desktop": (1280, 800)}
# One of each kind; the sweep visits the others.
SOME_PAGES = [
    "index.html",
    "03_ddp_launch/03_ddp_launch.html",
    "03_ddp_launch/train.py.html",
]
# Without transitions: an element that is moving would be measured on its way.
AT_ONCE = """addEventListener("DOMContentLoaded", () => {
  const style = document.createElement("style");
  style.textContent = "* { transition: none !important }";
  document.head.append(style);
})"""
# Returns what is wrong with a page in a mode, light or dark, as a list of sentences.
LOOK = """(mode) => {
  document.documentElement.dataset.theme = mode;
  const wrong = [];
  const text = (e) => e.textContent.trim().slice(0, 40);
  const name = (e) => `${e.tagName} ${e.className} ${text(e)}`;
  const overflow = (e) => getComputedStyle(e).overflowX;
  const width = document.documentElement.scrollWidth;
  if (width > innerWidth) wrong.push(`the page is ${width} pixels wide`);
  const bars = ".bd-sidebar-primary, .bd-sidebar-secondary";
  for (const bar of document.querySelectorAll(bars))
    if (bar.scrollWidth > bar.clientWidth + 1)
      wrong.push(`wider than its place: ${name(bar)}`);

  for (const image of document.querySelectorAll("article img")) {
    const box = image.getBoundingClientRect();
    const both = { opacityProperty: true, visibilityProperty: true };
    const shown = image.checkVisibility(both);
    if (!image.naturalWidth || !shown || box.width < 50 || box.height < 20)
      wrong.push(`no picture: ${image.getAttribute("src")}`);
  }

  const parts = "article, article *, .prev-next-area *";
  for (const e of document.querySelectorAll(parts)) {
    const cuts = ["hidden", "clip"].includes(overflow(e)) && e.clientWidth;
    if (cuts && e.scrollWidth > e.clientWidth + 1) wrong.push(`clipped: ${name(e)}`);
    const box = e.getBoundingClientRect();
    if (box.left >= 0 && box.right <= innerWidth + 1) continue;
    let parent = e.parentElement;
    while (parent && !["auto", "scroll"].includes(overflow(parent)))
      parent = parent.parentElement;
    if (!parent) wrong.push(`outside: ${name(e)}`);
  }

  const canvas = document.createElement("canvas");
  const pixel = canvas.getContext("2d", { willReadFrequently: true });
  const light = {};
  const luminance = (color) => light[color] ??= (() => {
    pixel.clearRect(0, 0, 1, 1);
    pixel.fillStyle = color;
    pixel.fillRect(0, 0, 1, 1);
    const [r, g, b] = [...pixel.getImageData(0, 0, 1, 1).data].map((value) =>
      value <= 10 ? value / 3294.6 : ((value / 255 + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  })();
  for (const pre of document.querySelectorAll("article pre")) {
    let behind = pre;
    while (getComputedStyle(behind).backgroundColor === "rgba(0, 0, 0, 0)")
      behind = behind.parentElement;
    const back = luminance(getComputedStyle(behind).backgroundColor);
    for (const span of pre.querySelectorAll("span")) {
      if (!span.textContent.trim()) continue;
      const front = luminance(getComputedStyle(span).color);
      const contrast = (Math.max(front, back) + 0.05) / (Math.min(front, back) + 0.05);
      if (contrast < 4.5) wrong.push(`contrast ${contrast.toFixed(1)}: ${name(span)}`);
    }
  }
  return wrong.slice(0, 5);
}"""


def skip(reason):
    """Skip the test, or fail if REQUIRE_SITE says that the site has to be tested."""
    if os.environ.get("REQUIRE_SITE"):
        pytest.fail(reason)
    pytest.skip(reason)


def need(*packages):
    for package in packages:
        if not importlib.util.find_spec(package):
            skip(f"the package {package} is not installed; `make site` installs it")


def build(*arguments, cwd=ROOT):
    """Run tools/build_site.py; return the subprocess.CompletedProcess."""
    return subprocess.run(
        [sys.executable, "-m", "tools.build_site", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Return the folder of the built site."""
    need("sphinx", "myst_nb", "sphinx_book_theme")
    folder = tmp_path_factory.mktemp("site")
    done = build(folder)
    assert done.returncode == 0, done.stderr
    return folder / "html"


@pytest.fixture(scope="module")
def browser():
    need("playwright")
    from playwright.sync_api import sync_playwright

    names = ("chromium", "chromium-browser", "google-chrome")
    program = next(filter(None, map(shutil.which, names)), None)
    if not program:
        skip("no Chromium; on Debian: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program)
        yield browser
        browser.close()


class Page(HTMLParser):
    """The ids of a page, the addresses it refers to, and the neighbors it names."""

    def __init__(self, path):
        super().__init__()
        self.ids, self.targets, self.neighbors = set(), [], {}
        self.feed(path.read_text())

    def handle_starttag(self, _tag, attributes):
        attributes = dict(attributes)
        self.ids.add(attributes.get("id"))
        targets = (attributes.get(key) for key in ("href", "src"))
        self.targets += [target for target in targets if target]
        for side in ("left-prev", "right-next"):
            if side in attributes.get("class", "").split():
                self.neighbors[side] = attributes["href"]


def all_pages(site):
    """Return {path from the site's folder: Page}."""
    found = [path for path in site.rglob("*.html") if "_static" not in path.parts]
    return {path.relative_to(site).as_posix(): Page(path) for path in sorted(found)}


@pytest.fixture(scope="module")
def pages(site):
    return all_pages(site)


def dead_links(site, pages):
    """Return the links within the site that lead nowhere."""
    dead = []
    for name, page in pages.items():
        for target in page.targets:
            path, _, anchor = target.partition("#")
            if re.match(r"\w+:|//", path):  # to another host
                continue
            path = unquote(path.partition("?")[0])
            file = ((site / name).parent / path if path else site / name).resolve()
            if not file.is_file() or not file.is_relative_to(site):
                dead.append(f"{name}: {target}")
                continue
            to = file.relative_to(site).as_posix()
            if anchor and unquote(anchor) not in pages[to].ids:
                dead.append(f"{name}: {target}, only {to} exists")
    return dead


def test_every_link_leads_somewhere(site, pages):
    assert sum(len(page.targets) for page in pages.values()) > 1000
    assert not dead_links(site, pages)


def wanted_order():
    """Return the first pages: README, then each stage's notebooks and scripts."""
    names = known_files()
    order = ["index.html"]
    for stage in STAGES:
        books = [name.removesuffix(".ipynb") for name in notebooks(stage, names)]
        programs = scripts(stage, names)
        programs += [f"demos/{name}" for name in scripts(f"{stage}/demos", names)]
        order += [f"{stage}/{name}.html" for name in [*books, *programs]]
    return order


def test_previous_and_next_lead_through_all_pages(site, pages):
    here, order = "index.html", []
    while here:
        order.append(here)
        after = pages[here].neighbors.get("right-next")
        folder = (site / here).parent
        there = None
        if after:
            there = (folder / after).resolve().relative_to(site).as_posix()
            back = (site / there).parent / pages[there].neighbors["left-prev"]
            assert back.resolve() == site / here
        here = there
    wanted = wanted_order()
    assert [name.partition("/")[2] for name in wanted if name[:2] == "06"][:6] == [
        "06_slurm.html",
        "when_it_hangs.html",
        "train.py.html",
        "first_job.sbatch.html",
        "job.sbatch.html",
        "job_torchrun.sbatch.html",
    ]
    assert "03_ddp_launch/demos/by_hand.py.html" in wanted
    assert order[: len(wanted)] == wanted
    assert sorted([*order, "search.html"]) == sorted(pages)
    for name in known_files():
        path = Path(name)
        if path.suffix == ".md" and name != "README.md":
            assert f"{path.with_suffix('.html')}" in order
        folders = ("common", "recipes", "recipes/neighbors", "docs/your_own_script")
        in_folder = str(path.parent) in folders
        if in_folder and path.suffix == ".py" and (ROOT / path).stat().st_size:
            assert f"{name}.html" in order
    assert "docs/conf.py.html" not in order


@pytest.mark.parametrize("stage", STAGES)
def test_a_script_has_all_its_lines(stage, pages):
    lines = (ROOT / stage / "train.py").read_text().splitlines()
    ids = pages[f"{stage}/train.py.html"].ids
    assert {f"L-{n}" for n, line in enumerate(lines, 1) if line.strip()} <= ids
    assert {"docstring-and-imports", "1-flags", "6-the-run"} <= ids


@pytest.mark.parametrize("stage", STAGES)
def test_a_notebook_links_to_the_sections_that_it_shows(stage, pages):
    cells = json.loads((ROOT / stage / f"{stage}.ipynb").read_text())["cells"]
    code = [cell["source"] for cell in cells if cell["cell_type"] == "code"]
    source = "\n".join("".join(lines) for lines in code)
    targets = pages[f"{stage}/{stage}.html"].targets
    links = [target for target in targets if "train.py.html#" in target]
    assert len(links) == len(re.findall(r"lesson\.show(?:_diff)?\(", source)) > 0
    assert "train.py.html" in targets


def watched_page(context, found):
    """Return a new page that adds errors and requests to other hosts to `found`."""
    page = context.new_page()

    def foreign(route):
        found.append(f"{page.url}: asks for {route.request.url}")
        route.abort()

    context.route(re.compile("^(?!file:|data:)"), foreign)

    def report(text):
        found.append(f"{page.url}: {text}")

    page.on("console", lambda line: line.type == "error" and report(line.text))
    page.on("pageerror", report)
    page.on("requestfailed", lambda request: report(f"{request.url} failed"))
    return page


def problems(context, site, names):
    """Visit pages, in both windows and both modes; return what is wrong with them."""
    found = []
    page = watched_page(context, found)
    page.add_init_script(AT_ONCE)
    windows = list(WINDOWS.items())
    for name in names:
        page.goto(f"file://{site / name}")
        windows.reverse()  # one page is loaded on the phone, the next on the desktop
        for window, (width, height) in windows:
            page.set_viewport_size({"width": width, "height": height})
            for mode in ("light", "dark"):
                wrong = page.evaluate(LOOK, mode)
                found += [f"{name}, {window}, {mode}: {sentence}" for sentence in wrong]
    return found


def test_a_browser_shows_pages_whole(site, browser):
    with browser.new_context() as context:
        found = problems(context, site, SOME_PAGES)
    assert not found, "\n".join(found)


@pytest.mark.sweep
def test_a_browser_shows_every_page_whole(site, pages, browser):
    with browser.new_context() as context:
        found = problems(context, site, sorted(pages.keys() - set(SOME_PAGES)))
    assert not found, "\n".join(found)


def test_the_search_finds_a_word(site, browser):
    wrong = []
    with browser.new_context() as context:
        page = watched_page(context, wrong)
        page.goto(f"file://{site / 'search.html'}?q=DistributedSampler")
        page.wait_for_selector("#search-results p.search-summary:has-text('found')")
        results = page.locator("#search-results li a")
        links = results.evaluate_all("all => all.map(a => a.href)")
    assert not wrong
    for wanted in ("03_ddp_launch/03_ddp_launch.html", "03_ddp_launch/train.py.html"):
        assert any(wanted in link for link in links)


def test_the_reader_chooses_the_mode(site, browser):
    with browser.new_context(color_scheme="dark") as context:
        page = context.new_page()
        page.goto(f"file://{site / 'index.html'}")
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"
        page.locator(".theme-switch-button").click()
        page.locator(".theme-change-button[data-mode=light]").click()
        assert page.evaluate("document.documentElement.dataset.theme") == "light"


@pytest.mark.parametrize(
    "arguments", [["."], ["file/below"], ["one", "two"], ["--help"]]
)
def test_wrong_use_gets_one_line(arguments, tmp_path):
    need("sphinx", "myst_nb", "sphinx_book_theme")
    (tmp_path / "file").touch()
    done = build(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("build_site.py: error: ")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
