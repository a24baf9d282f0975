"""The site that `make site` builds: README.zh-CN.md says that each page has a switch.

Sphinx, which makes each warning an error, does not see the links of the templates.
"""

import os
import re
from pathlib import Path
from urllib.parse import unquote

import pytest

from harness.stages import ROOT
from harness.stages import known_files

pytestmark = [pytest.mark.ci, pytest.mark.slow]

SITE = ROOT / "docs/_build/html"


@pytest.fixture(scope="module")
def texts():
    """Return {path below the site: text} of its pages."""
    if not (SITE / "zh_CN/README.html").is_file():
        stop = pytest.fail if os.environ.get("REQUIRE_SITE") else pytest.skip
        stop("no site: type `make site`")
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
