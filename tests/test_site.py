"""The site: built without a warning, complete, without dead links, and not too wide."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from urllib.parse import unquote

import pytest

from tools.stages import ROOT
from tools.stages import known_files

PAGES = ["README.html", "03_ddp_launch/03_ddp_launch.html"]
WIDTHS = {"phone": 390, "desktop": 1280}


def need(there, what):
    """Skip the test if something is missing, or fail if REQUIRE_SITE is set."""
    if not there:
        (pytest.fail if os.environ.get("REQUIRE_SITE") else pytest.skip)(what)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Return the folder of the built site; Sphinx itself checks links to files."""
    for package in ("sphinx", "myst_nb", "sphinx_book_theme", "playwright"):
        found = importlib.util.find_spec(package)
        need(found, f"the package {package} is missing; `make site` installs it")
    folder = tmp_path_factory.mktemp("site")
    options = ["--quiet", "--fail-on-warning", "--keep-going", "--jobs", "auto"]
    command = [sys.executable, "-m", "sphinx", *options, "-c", "docs", ".", folder]
    done = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_and_notebook_is_there(site):
    names = [n for n in known_files() if re.search(r"\.(md|ipynb)$", n) and n[0] != "."]
    assert len(names) > 20
    assert [n for n in names if not (site / n).with_suffix(".html").is_file()] == []


def test_every_link_leads_somewhere(site):
    pages = [page for page in site.rglob("*.html") if "_static" not in page.parts]
    texts = {page: page.read_text() for page in pages}
    ids = {page: set(re.findall(r'\bid="([^"]+)"', texts[page])) for page in pages}
    dead, checked = [], 0
    for page, text in texts.items():
        for link in re.findall(r'(?:href|src)="(?!\w+:|//)([^"]+)"', text):
            path, _, anchor = unquote(link).partition("#")
            file = (page.parent / path.partition("?")[0]).resolve() if path else page
            missing = anchor and anchor not in ids.get(file, ())
            dead += [f"{page}: {link}"] if missing or not file.is_file() else []
            checked += 1
    assert checked > 1000
    assert dead == []


@pytest.mark.parametrize("window", WIDTHS)
def test_a_browser_shows_whole_pages(site, window):
    chromium = shutil.which("chromium")
    need(chromium, "no Chromium; on Debian: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    asked_for = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium)
        page = browser.new_page(viewport={"width": WIDTHS[window], "height": 800})
        page.on("request", lambda request: asked_for.append(request.url))
        for name in PAGES:
            page.goto(f"file://{site / name}")
            width = page.evaluate("document.documentElement.scrollWidth")
            broken = page.evaluate("[...document.images].some((i) => !i.naturalWidth)")
            assert (name, width, broken) == (name, WIDTHS[window], False)
        browser.close()
    assert [url for url in asked_for if not url.startswith(("file:", "data:"))] == []
