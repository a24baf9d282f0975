"""The site that `make site` builds is complete in English and in Chinese.

README.zh-CN.md says that each page has a switch; CONTRIBUTING.md, what fails the build.
"""

import functools
import http.server
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from urllib.parse import quote
from urllib.parse import unquote

import pytest

from harness.stages import ROOT
from harness.stages import known_files

pytestmark = [pytest.mark.ci, pytest.mark.slow]

SITE = ROOT / "docs/_build/html"
CATALOGS = "docs/locale/zh_CN/LC_MESSAGES"


def need(there, what):
    """Skip the test if something is missing, or fail if REQUIRE_SITE is set."""
    if not there:
        (pytest.fail if os.environ.get("REQUIRE_SITE") else pytest.skip)(what)


@pytest.fixture(scope="module")
def texts():
    """Return {path below the site: text} of its pages."""
    need((SITE / "zh_CN/README.html").is_file(), "no site: type `make site`")
    pages = [page for page in SITE.rglob("*.html") if "_static" not in page.parts]
    return {page.relative_to(SITE).as_posix(): page.read_text() for page in pages}


def test_each_page_is_there_in_both_languages_and_leads_to_the_other(texts):
    names = [n for n in known_files() if re.search(r"\.(md|ipynb)$", n) and n[0] != "."]
    names = [re.sub(r"\.\w+$", ".html", n) for n in names if ".zh-CN." not in n]
    names.remove("SKILL.html")  # which is for assistants
    assert len(names) > 20
    for name in names:
        for page, lang in ((name, "en"), (f"zh_CN/{name}", "zh-CN")):
            (link,) = re.findall(
                r'class="language" lang="\S+" href="(.*?)"', texts[page]
            )
            other = os.path.normpath(Path(page).parent / link)
            assert {page, other} == {name, f"zh_CN/{name}"}
            assert re.search(f'<html[^>]* lang="{lang}"', texts[page])
    assert "每块 GPU 用一个进程" in texts["zh_CN/03_ddp_launch/03_ddp_launch.html"]


def test_no_link_is_dead_in_either_language(texts):
    ids = {name: {*re.findall(r'\bid="([^"]+)"', t)} for name, t in texts.items()}
    dead, checked = [], 0
    for page, text in texts.items():
        for link in re.findall(r'(?:href|src)="(?!\w+:|//)([^"]+)"', text):
            path, _, anchor = unquote(link).partition("#")
            file = SITE / page if not path else (SITE / page).parent / path
            name = os.path.relpath(str(file).partition("?")[0], SITE)
            missing = anchor and anchor not in ids.get(name, ())
            dead += (
                [f"{page}: {link}"] if missing or not (SITE / name).is_file() else []
            )
            checked += 1
    assert checked > 10_000
    assert dead == []


GOOD = 'msgid "Use `x`, [see](a.md)."\nmsgstr "用 `x`，见[这里](a.md)。"\n'


@pytest.mark.parametrize(
    "old, new, wrong",
    [
        ("这里", "那里", ""),
        ("`x`，", "它，", "1: no inline code `x`"),
        ("见[这里](a.md", "见[这里](b.md", "1: no link a.md"),
        ('msgstr "', 'msgstr "1. ', "1: begins as a list"),
        ('。"', "。", "2: syntax error"),
        ("msgstr ", "", "1: missing msgstr"),
    ],
)
def test_a_broken_catalog_is_named_with_its_line(old, new, wrong, tmp_path):
    need(importlib.util.find_spec("babel"), "no Babel, which comes with Sphinx")
    catalog = tmp_path / CATALOGS / "a.po"
    catalog.parent.mkdir(parents=True)
    catalog.write_text(GOOD.replace(old, new))
    words = [sys.executable, ROOT / "tools/site/catalogs.py"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == bool(wrong)
    assert done.stderr.startswith(f"{CATALOGS}/a.po:{wrong}" if wrong else "")


# ---- in a browser --------------------------------------------------------------------
class Silent(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def browser():
    """Return a page of Chromium, and the address at which the site is."""
    need(SITE.is_dir(), "no site: type `make site`")
    program = shutil.which("chromium")
    need(program, "no Chromium; on Debian: apt-get install chromium")
    need(importlib.util.find_spec("playwright"), "no playwright; make test installs it")
    from playwright.sync_api import sync_playwright

    serve = functools.partial(Silent, directory=SITE)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), serve)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=program).new_page()
        errors = []
        opened.on("pageerror", lambda error: errors.append(f"{error}"))
        yield opened, f"http://127.0.0.1:{server.server_port}"
        assert errors == []
    server.shutdown()


@pytest.mark.parametrize(
    "folder, words, wanted",
    [
        ("", "unused parameters", "/03_ddp_launch/what_goes_wrong.html"),
        ("/zh_CN", "混淆矩阵", "/zh_CN/07_distributed_eval/other_metrics.html"),
        ("/zh_CN", "断点续训", "/zh_CN/09_resume/"),
    ],
)
def test_a_search_finds_the_page_in_its_language(folder, words, wanted, browser):
    page, site = browser
    page.goto(f"{site}{folder}/search.html?q={quote(words)}")
    page.wait_for_selector(".pagefind-ui__result-link")
    links = "all => all.map((a) => new URL(a.href).pathname)"
    found = page.locator(".pagefind-ui__result-link").evaluate_all(links)
    assert any(link.startswith(wanted) for link in found), found
    assert all(link.startswith("/zh_CN/") == bool(folder) for link in found), found


@pytest.mark.parametrize(
    "folder, typed, shown, none",
    [
        ("", "closed by peer", "closed by peer", "No row has any of these words."),
        ("/zh_CN", "训练卡住", "卡住", "没有包含这些词的行。"),
    ],
)
def test_the_symptoms_are_filtered_by_words(folder, typed, shown, none, browser):
    page, site = browser
    page.goto(f"{site}{folder}/docs/symptoms.html#find={quote(typed)}")
    rows, says = page.locator("tbody tr:visible"), page.locator("output")
    assert 0 < rows.count() <= 12 and shown in rows.first.inner_text()
    page.locator("#words").fill("xyzzy")
    assert says.inner_text() == none and rows.count() == 0
    page.locator("#words").fill("")
    assert rows.count() > 100
