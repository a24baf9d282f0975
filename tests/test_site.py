"""The site that `make site` builds: complete, without dead links, not too wide."""

import importlib.util
import os
import re
import shutil
import sys
from urllib.parse import unquote

import pytest

from nbtools import harness
from tools.stages import ROOT
from tools.stages import known_files

pytestmark = [pytest.mark.ci, pytest.mark.slow, pytest.mark.timeout(1800)]

SITE = ROOT / "docs/_build/html"
PAGES = ["README.html", "03_ddp_launch/03_ddp_launch.html"]
WIDTHS = {"phone": 390, "desktop": 1280}


def need(there, what):
    """Skip the test if something is missing, or fail if REQUIRE_SITE is set."""
    if not there:
        (pytest.fail if os.environ.get("REQUIRE_SITE") else pytest.skip)(what)


def is_built():
    """Return whether the site is there, and no older than a page."""
    if not (front_page := SITE / "README.html").is_file():
        return False
    built = front_page.stat().st_mtime
    newer = [n for n in known_files() if (ROOT / n).stat().st_mtime > built]
    return not [n for n in newer if n.endswith((".md", ".ipynb")) or "docs/" in n]


@pytest.fixture(scope="module")
def site():
    """Return the folder of the site. Sphinx itself checks the links to files."""
    need(importlib.util.find_spec("myst_nb"), "no MyST-NB; make site installs it")
    if not is_built():
        harness.run(["make", "site", f"PY={sys.executable}"], seconds=1500)
    assert is_built()
    return SITE


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
    need(importlib.util.find_spec("playwright"), "no playwright; make site installs it")
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
