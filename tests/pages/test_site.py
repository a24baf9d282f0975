"""The site that `make site` builds is a book, complete, and works from a folder.

A browser opens the pages on which JavaScript computes or filters something.
"""

import dataclasses
import importlib.util
import inspect
import itertools
import json
import os
import random
import re
import shutil
import sys
from pathlib import Path
from urllib.parse import quote
from urllib.parse import unquote

import pytest

from harness import commands
from harness.stages import ROOT
from harness.stages import first_with
from harness.stages import known_files
from harness.stages import notebooks
from harness.stages import parts
from harness.stages import steps
from tests.training import load_program
from tools import diff
from tools import zh

pytestmark = [pytest.mark.ci, pytest.mark.slow, pytest.mark.timeout(1800)]

SITE = ROOT / "docs/_build/html"
DDP = "{0}/{0}.html".format(first_with("ddp"))
SYMPTOMS, STAGE_DIFF = "docs/symptoms.html", "docs/stage_diff.html"
CALCULATOR, STEPS = "docs/calculator.html", "docs/steps.html"
memory = load_program(ROOT / "your_own_script/memory.py", "memory_calculator")
# What readers search for, and the page that explains it.
MESSAGES = {
    "hang": SYMPTOMS,
    "ChildFailedError": SYMPTOMS,
    "Address already in use": SYMPTOMS,
    "NCCL timeout": SYMPTOMS,
    "Watchdog caught collective operation timeout": SYMPTOMS,
    "CUDA out of memory": SYMPTOMS,
    "Bus error": SYMPTOMS,
    "Connection closed by peer": SYMPTOMS,
    "DUE TO TIME LIMIT": SYMPTOMS,
    "unused parameters": f"{first_with('ddp')}/what_goes_wrong.html",
    "learning rate": f"{first_with('ddp')}/batch_and_learning_rate.html",
}


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
    ends, machinery = (".md", ".ipynb", "train.py", "stages.toml"), "tools/site/"
    return not [n for n in newer if n.endswith(ends) or n.startswith(machinery)]


@pytest.fixture(scope="module")
def site():
    """Return the folder of the site. Sphinx itself checks the links to files."""
    need(importlib.util.find_spec("myst_nb"), "no MyST-NB; make site installs it")
    if not is_built():
        commands.run(["make", "site", f"PY={sys.executable}"], seconds=1500)
    assert is_built()
    return SITE


@pytest.fixture(scope="module")
def texts(site):
    """Return {path below the site: text} of its pages."""
    pages = [page for page in site.rglob("*.html") if "_static" not in page.parts]
    return {page.relative_to(site).as_posix(): page.read_text() for page in pages}


@pytest.fixture(scope="module")
def chromium():
    program = shutil.which("chromium")
    need(program, "no Chromium; on Debian: apt-get install chromium")
    need(importlib.util.find_spec("playwright"), "no playwright; make site installs it")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program)
        yield browser
        browser.close()


@pytest.fixture
def visit(site, chromium):
    """Return a function that opens a page from the folder.

    At the end no page has asked another host for something, or printed an error.
    """
    contexts, asked_for, errors = [], [], []

    def open_page(name):
        context = chromium.new_context(viewport={"width": 1280, "height": 800})
        contexts.append(context)
        page = context.new_page()
        page.on("request", lambda request: asked_for.append(request.url))
        page.on("pageerror", lambda error: errors.append(f"{name}: {error}"))
        page.on("console", lambda m: m.type == "error" and errors.append(m.text))
        page.goto(f"file://{site / name}")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert asked_for
    assert [url for url in asked_for if not url.startswith(("file:", "data:"))] == []
    assert errors == []


# ---- which pages there are -----------------------------------------------------------
def test_every_page_and_notebook_is_there(site):
    names = [n for n in known_files() if re.search(r"\.(md|ipynb)$", n) and n[0] != "."]
    names.remove("SKILL.md")  # which is for assistants
    assert len(names) > 20
    assert [n for n in names if not (site / n).with_suffix(".html").is_file()] == []


def test_every_link_leads_somewhere_and_every_page_is_linked(site, texts):
    ids = {
        name: set(re.findall(r'\bid="([^"]+)"', text)) for name, text in texts.items()
    }
    dead, linked, checked = [], set(), 0
    for page, text in texts.items():
        for link in re.findall(r'(?:href|src)="(?!\w+:|//)([^"]+)"', text):
            path, _, anchor = unquote(link).partition("#")
            file = (
                (site / page).parent / path.partition("?")[0] if path else site / page
            )
            name = os.path.relpath(file, site)
            missing = anchor and anchor not in ids.get(name, ())
            dead += [f"{page}: {link}"] if missing or not file.is_file() else []
            linked |= {name} - {page}
            checked += 1
    assert checked > 1000
    assert dead == []
    assert set(texts) - linked <= {"index.html", "search.html"}


# ---- a book --------------------------------------------------------------------------
def test_previous_and_next_lead_through_the_notebooks_in_order(texts):
    """Beside the path, a notebook leads back to its stage, and on to the next."""
    books = [path.relative_to(ROOT).with_suffix(".html") for path in notebooks()]
    order = [each.as_posix() for each in books if each.stem == each.parent.name]
    order = ["README.html", *order, "your_own_script/README.html"]
    following = {}
    for page, text in texts.items():
        for kind, link in re.findall(
            r'class="(left-prev|right-next)"\s+\w+="(.*?)"', text
        ):
            there = os.path.normpath(Path(page).parent / link)
            following[page, kind] = there
    wanted = {(one, "right-next"): two for one, two in itertools.pairwise(order)}
    back = {(two, "left-prev"): one for one, two in itertools.pairwise(order[:-1])}
    wanted |= back
    for book in books:
        main = f"{book.parent}/{book.parent}.html"
        if book.as_posix() != main:
            wanted[book.as_posix(), "left-prev"] = main
            wanted[book.as_posix(), "right-next"] = wanted[main, "right-next"]
    chinese = {
        (page.replace(".html", f"{zh.CHINESE}.html"), kind): there
        for (page, kind), there in wanted.items()
    }
    for (page, kind), there in chinese.items():
        if page in texts:
            other = there.replace(".html", f"{zh.CHINESE}.html")
            wanted[page, kind] = other if other in texts else there
    assert wanted.items() <= following.items()
    pages = [n.replace(".md", ".html") for n in known_files() if n.endswith(".md")]
    dead_ends = [n for n in pages if n in texts and (n, "right-next") not in following]
    assert dead_ends == []


def test_the_sidebar_has_captions_in_order(texts):
    found = re.findall(r'class="caption-text">(.*?)<', texts["README.html"])
    ranges = [
        f"{part} · {stages[0].number}–{stages[-1].number}"
        for part, stages in parts().items()
    ]
    assert found == ["Start", *ranges, "When it fails", "Reference", "Code", "中文"]


def test_the_sidebar_has_one_language_and_shows_the_current_page(visit):
    shown = "all => all.filter((e) => e.offsetParent).map((e) => e.textContent)"
    for name in ("{0}/{0}".format(first_with("tensor_parallel")), "docs/symptoms"):
        for language in ("", zh.CHINESE):
            page = visit(f"{name}{language}.html")
            captions = page.locator(".bd-links .caption-text").evaluate_all(shown)
            assert ("中文" in captions) == bool(language)
            assert len(captions) == 1 or not language
            here = page.locator("#pst-primary-sidebar li.current > a[href='#']")
            box = here.last.bounding_box()
            assert box["y"] >= 0 and box["y"] + box["height"] <= 800


def test_a_script_leads_back_to_the_page_that_explains_it(texts):
    scripts = [name for name in known_files() if name.endswith((".py", ".sbatch"))]
    pages = {name: texts.get(re.sub(r"\.\w+$", ".html", name)) for name in scripts}
    pages = {
        name: text for name, text in pages.items() if text and "__init__" not in name
    }
    assert len(pages) > 200
    back = r'<p>Explained in <a class="reference internal" \w+="([^"]+)'
    left = {name: re.findall(back, text) for name, text in pages.items()}
    assert [name for name in pages if len(left[name]) != 1] == []
    stage = first_with("ddp")
    assert left[f"{stage}/demos/unused_parameter.py"] == ["../what_goes_wrong.html"]
    assert left[f"{stage}/train.py"] == [f"{stage}.html"]


# ---- two languages -------------------------------------------------------------------
def test_a_page_in_both_languages_leads_to_the_other_one(texts):
    plain = {page: text.replace('"', "'") for page, text in texts.items()}
    ours = {page for page in texts if f"{zh.CHINESE}.html" in page}
    theirs = {page: page.replace(zh.CHINESE, "") for page in ours}
    switch = re.compile(r"<p class='languages'>(.*) \| (.*)</p>")
    assert len(ours) == len(zh.translations())
    for page, other in theirs.items():
        names = [Path(name).name for name in (page, other)]
        there = f"<a href='{names[0]}' lang='zh-CN'>中文</a>"
        back = f"<a href='{names[1]}' lang='en'>English</a>"
        assert switch.findall(plain[page]) == [(back, "中文")]
        assert switch.findall(plain[other]) == [("English", there)]
        assert re.search("<html[^>]* lang='zh-CN'", plain[page])
    others = {*texts} - ours - {*theirs.values()}
    assert not [page for page in others if switch.search(plain[page])]


# ---- symptoms ------------------------------------------------------------------------
@pytest.fixture(scope="module", params=["", zh.CHINESE])
def filtered(request, chromium, tmp_path_factory):
    """Return the suffix of the page's language, and the page, built alone."""
    need(importlib.util.find_spec("myst_parser"), "no MyST; make site installs it")
    from docutils.core import publish_string
    from myst_parser.docutils_ import Parser

    settings = {
        "report_level": 5,  # links lead to other pages
        "doctitle_xform": False,
        "initial_header_level": 1,
        "myst_heading_anchors": 6,
        "stylesheet_path": None,
        "embed_stylesheet": False,
        "output_encoding": "unicode",
    }
    text = (ROOT / f"docs/symptoms{request.param}.md").read_text()
    page = publish_string(
        text, parser=Parser(), writer="html5", settings_overrides=settings
    )
    script = (ROOT / "tools/site/_static/symptoms.js").read_text()
    page = page.replace("<main", '<main class="bd-article"')
    page = page.replace("</body>", f"<script>{script}</script></body>")
    if request.param:
        page = re.sub('<html([^>]*) lang="en"', '<html\\1 lang="zh-CN"', page)
    file = tmp_path_factory.mktemp("symptoms") / "page.html"
    file.write_text(page)
    opened, errors = chromium.new_page(), []
    opened.on("pageerror", lambda error: errors.append(f"{error}"))
    opened.goto(f"file://{file}")
    yield request.param, opened
    opened.close()
    assert errors == []


def test_what_readers_type_finds_its_row_first(filtered):
    """Words, lines of messages and whole logs, each below words of the row."""
    language, page = filtered
    left = page.locator("tbody tr:visible")
    asked = (ROOT / f"tests/asked_of_symptoms{language}.txt").read_text()
    wrong = []
    for one in asked.rstrip("\n").split("\n----\n"):
        words, typed = one.split("\n", 1)
        page.locator("#words").fill(typed)
        found = left.all_inner_texts()
        if not found or words not in found[0]:
            wrong.append((words, typed[:60], [row[:60] for row in found[:3]]))
        assert len(found) <= 12
    assert wrong == []


def test_the_filter_says_what_it_shows(filtered):
    language, page = filtered
    words, says = page.locator("#words"), page.locator("output")
    left = page.locator("tbody tr:visible")
    words.fill("")
    every = left.count()
    assert every > 200
    words.fill("PEER closed")
    assert 0 < left.count() < 5
    assert f"{left.count()}" in says.inner_text()
    assert all("closed by peer" in row for row in left.all_inner_texts())
    assert page.locator("h2:visible").count() == 0
    words.fill("peer closed xyzzy")
    assert "closed by peer" in left.first.inner_text()
    assert re.search("2 of 3|3 个词中的 2 个", says.inner_text())
    words.fill("xyzzy")
    none = "没有包含这些词的行。" if language else "No row has any of these words."
    assert left.count() == 0 and says.inner_text() == none
    # A section of this page stands below a row that leads to it.
    words.fill("oom_kill")
    assert page.locator("h3:visible").count() >= 1
    words.fill("")
    assert left.count() == every and says.inner_text() == ""


def test_the_address_of_the_symptoms_has_the_words(visit):
    page = visit(f"{SYMPTOMS}#find=closed%20peer")
    left = page.locator("tbody tr:visible")
    assert 0 < left.count() < 5
    assert left.first.locator("td").last.is_visible()
    page.get_by_label("Words of your message").fill("EADDRINUSE")
    page.wait_for_url("**#find=EADDRINUSE")


# ---- any two stages ------------------------------------------------------------------
def test_the_difference_between_two_stages_is_that_of_diff(visit):
    page = visit(STAGE_DIFF)
    shown = page.locator("#shown")
    (one, two), *_, (three, four) = steps()
    turn = str.maketrans("+-", "-+")
    for before, after in ((one, two), (three, four), (one, four), (four, one)):
        page.get_by_label("from").select_option(before)
        page.get_by_label("to", exact=True).select_option(after)
        lines = shown.inner_text().rstrip("\n").split("\n")
        lines = [line for line in lines if not line.startswith("@@")]
        wanted = diff.unified(*sorted((before, after)))
        wanted = [line for line in wanted if not line.startswith("@@")]
        if before > after:
            wanted = [line[0].translate(turn) + line[1:] for line in wanted]
        assert lines == wanted
    page = visit(f"{STAGE_DIFF}#{one[:2]}-{four[:2]}")
    assert page.get_by_label("to", exact=True).input_value() == four


# ---- the memory calculator -----------------------------------------------------------
# What the models' own pages say they have.
PARAMETERS = {
    "Llama-3-8B": 8_030_261_248,
    "Llama-3-70B": 70_553_706_496,
    "Llama-3.2-1B": 1_235_814_400,
    "Mistral-7B": 7_241_732_096,
    "Qwen3-8B": 8_190_735_360,
    "Qwen2-7B": 7_615_616_512,
    "Qwen2.5-1.5B": 1_543_714_304,
    "Qwen2.5-0.5B": 494_032_768,
    "GPT-2": 124_439_808,
}
OTHER = f"model={quote('another shape, or a config.json')}&layers=3&width=96&heads=4"
OTHER += "&inner=200&vocabulary=1000"
SHAPES = [
    *(f"model={quote(name)}" for name in PARAMETERS),
    f"{OTHER}&kv_heads=2&positions=0&qkv_bias=true&output_bias=true&mlp_bias=true",
    f"{OTHER}&kv_heads=4&positions=64&tied=true&block=gpt",
]
GPUS = ((1, 1, 480), (8, 1, 8192), (3, 1, 1), (4, 2, 480), (8, 4, 9), (3, 2, 1))
CHOICES = {
    "precision": memory.PRECISIONS,
    "groups": memory.GROUPS,
    "activation_checkpointing": ("false", "true"),
    "grad_accum": ("false", "true"),
    "train": ("all", "lora", "qlora"),
    "optimizer": ("adamw", "adamw-8bit"),
    "offload": ("false", "true"),
    "loss_chunk": ("0", "256"),
    "targets": tuple(memory.TARGETS),
    "length": ("0", "1"),
    "bandwidth": ("", "12.5"),
}
SPEED = {"tokens_per_second": 7000.0, "total_tokens": 15e9}
CALCULATED = """(hashes) => hashes.map((hash) => {
  location.hash = hash;
  fromAddress();
  const all = settings();
  const wrong = misfit(all);
  const parameters = count(divided(all, 1)).parameters;
  if (wrong[0]) return [all, parameters, {}, wrong, 0, null, 0, []];
  const [{ lines }, host] = [table(all, all), inHostMemory(all, all)];
  const time = [operations(all, all), howLong(all, all)];
  return [all, parameters, lines, wrong, host, smallest(all, 79, all), ...time];
})"""


def options(seed):
    """Return settings of all choices for each number of GPUs, each value often."""
    drawn = random.Random(seed)
    for gpus, by, tokens in GPUS:
        for _ in range(40):
            words = [
                f"{name}={drawn.choice(values)}" for name, values in CHOICES.items()
            ]
            sizes = f"gpus={gpus}&tensor_parallel={by}&tokens={tokens}"
            speed = [f"{name}={value}" for name, value in SPEED.items()]
            yield "&".join([sizes, *speed, *words])


def test_the_calculator_has_the_numbers_of_memory_py(visit):
    page = visit(CALCULATOR)
    compared = refused = 0
    names = [field.name for field in dataclasses.fields(memory.Shape)]
    wanted = list(inspect.signature(memory.table).parameters)[1:]
    for seed, shape in enumerate(SHAPES):
        hashes = [f"{shape}&{each}" for each in options(seed)]
        for given, parameters, lines, wrong, host, gpus, each, time in page.evaluate(
            CALCULATED, hashes
        ):
            sizes = {name: given[name] for name in names}
            sizes["head_dim"] = sizes["head_dim"] or given["width"] // given["heads"]
            counted = memory.Shape(**sizes)
            assert parameters == counted.parameters
            assert parameters == PARAMETERS.get(given["model"], parameters)
            flags = {name: given[name] for name in wanted}
            assert wrong == [*memory.misfit(counted, flags)]
            refused += bool(wrong[0])
            if wrong[0]:
                continue
            assert lines == memory.table(counted, **flags), (shape, flags)
            assert host == memory.in_host_memory(counted, flags)
            assert gpus == memory.smallest(counted, 79, flags)
            longest = min(counted.positions or given["tokens"], given["tokens"])
            length = given["length"] or longest
            assert each == memory.operations(counted, length, flags)
            speed = [*SPEED.values(), given["bandwidth"]]
            assert time == [*memory.how_long(counted, flags, *speed)]
            compared += len(lines)
    assert compared > 5000 and refused > 300


CONFIGS = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"head_dim": 32, "num_key_value_heads": None},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 8},
    "t5": {},
    "granite": {"hidden_size": None},
    "smollm3": {"vocab_size": 0},
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_pasted_config_is_read_as_memory_py_does(kind, visit, tmp_path):
    config = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    config |= {"intermediate_size": 96, "vocab_size": 512, "num_key_value_heads": 2}
    config |= {"model_type": kind} | CONFIGS[kind]
    text = json.dumps(
        {name: value for name, value in config.items() if value is not None}
    )
    (tmp_path / "config.json").write_text(text)
    page = visit(CALCULATOR)
    page.locator("[name=model]").select_option("another shape, or a config.json")
    page.locator("textarea").fill(text)
    shown = page.locator(".calculated").inner_text()
    try:
        shape = memory.from_config(tmp_path)
    except ValueError as error:
        assert shown == f"config.json: {error}".replace("'t5'", "t5")
    else:
        assert f"{shape.parameters:,} parameters" in shown


def test_the_calculator_says_what_fits(visit):
    page = visit(CALCULATOR)
    result, bars = page.locator(".calculated"), page.locator(".calculated .bar")
    options = {"activation_checkpointing": True}

    def shown():
        most = max(memory.together(memory.table(memory.Shape(), **options)))
        return f"At most {most / 2**30:.2f} GiB"

    assert f"{shown()}: fits in 79 GiB." in result.inner_text()
    assert "It takes 3 GPUs of 79 GiB" in result.inner_text()
    assert bars.count() == len(memory.MOMENTS)
    page.get_by_label("activation checkpointing").uncheck()
    options["activation_checkpointing"] = False
    assert f"{shown()}: does not fit" in result.inner_text()
    assert page.url.endswith("#activation_checkpointing=false")
    page.locator("[name=gpus]").fill("0")
    assert result.inner_text() == "GPUs: should be an integer, 1 or more"
    assert not page.locator("[name=layers]").is_visible()
    page.locator("[name=gpus]").fill("8")
    page.locator("[name=model]").select_option("another shape, or a config.json")
    page.locator("[name=heads]").fill("3")
    assert result.inner_text() == "heads must divide width"
    page.goto(f"file://{SITE}/{CALCULATOR}#tensor_parallel=16")
    assert "number of GPUs (8)" in result.inner_text()
    page.goto(f"file://{SITE}/{CALCULATOR}#room=24")  # what is not named is reset
    options["activation_checkpointing"] = True
    assert f"{shown()}: does not fit in 24 GiB" in result.inner_text()
    page.goto(f"file://{SITE}/{CALCULATOR}#model=Llama-9")
    assert result.inner_text() == "model: there is no Llama-9"
    page.goto(f"file://{SITE}/{CALCULATOR}#tokens_per_second=7000&total_tokens=15e9")
    hours = 15e9 / 8 / 7000 / 3600
    said = f"At least {hours / 24:,.2f} days, {8 * hours:,.2f} GPU hours"
    assert said in result.inner_text()
    page.get_by_label("GB/s").fill("-1")
    assert result.inner_text().endswith("should be a number, 0.001 or more")


# ---- a training step -----------------------------------------------------------------
def test_one_goes_through_a_recorded_step_by_keys(visit):
    recorded = json.loads((ROOT / "tools/site/steps.json").read_text())["steps"]
    first, *_, last = recorded
    page = visit(STEPS)
    says, ranks = page.locator(".says"), page.locator(".rank")
    for stage in (first, last):
        page.locator(".steps select").select_option(stage)
        page.locator(".bd-article h1").click()
        script = (ROOT / stage / "train.py").read_text().splitlines()
        for moment in recorded[stage][0]:
            what, module = moment[0], moment[1]
            wanted = what if isinstance(module, list) else module
            wanted = "optimizer" if what == "optimizer" else wanted
            assert wanted in says.inner_text()
            line = page.locator(".steps pre .hll").inner_text()
            assert line.rstrip("\n")[6:] == script[moment[-2] - 1]
            sending = page.locator(".rank.sends").count()
            assert sending == (ranks.count() if isinstance(module, list) else 0)
            page.keyboard.press("ArrowRight")
        assert ranks.count() == len(recorded[stage])
        page.keyboard.press("ArrowLeft")
        assert page.url.endswith(f"#{stage[:2]}-{len(recorded[stage][0]) - 1}")


# ---- search --------------------------------------------------------------------------
def found_by(page, words):
    """Return the addresses of what a search finds, in order."""
    page.goto(f"file://{SITE}/search.html?q={quote(words)}")
    page.wait_for_selector(".search-summary:has-text('found')")
    links = "[...document.querySelectorAll('ul.search li > a')].map((a) => a.href)"
    found = page.evaluate(links)
    return [unquote(url).removeprefix(f"file://{SITE}/") for url in found]


def test_a_search_finds_first_what_explains_a_message(visit):
    page = visit("search.html")
    for words, wanted in MESSAGES.items():
        found = found_by(page, words)
        assert re.match(re.escape(wanted), found[0]), (words, found[:5])
        assert not [f for f in found if re.match("(tests|tools|nbtools)/", f)], words
    page.goto(f"file://{SITE}/{SYMPTOMS}#find=ChildFailedError")
    assert 0 < page.locator("tbody tr:visible").count() < 10


def test_a_search_that_finds_nothing_offers_the_filter_of_the_symptoms(visit):
    page = visit("search.html?q=xyzzy+ChildFailedError")
    page.wait_for_selector(".search-summary:has-text('did not match')")
    page.get_by_text("Look for it in the symptoms").click()
    page.wait_for_selector("form.filter")
    assert page.url.endswith(f"{SYMPTOMS}#find=xyzzy%20ChildFailedError")
    assert "ChildFailedError" in page.locator("tbody tr:visible").first.inner_text()


# Words of one of the Chinese notebooks, alone and in a phrase, and with English.
@pytest.mark.parametrize("words", ["混淆", "混淆矩阵", "检测框的类别", "mAP 检测框"])
def test_a_search_for_chinese_words_finds_the_chinese_page(visit, words):
    found = found_by(visit("search.html"), words)
    wanted = f"07_distributed_eval/other_metrics{zh.CHINESE}.html"
    assert any(one.startswith(wanted) for one in found), found
    assert not [one for one in found if zh.CHINESE not in one and words[0] != "m"]


def test_a_result_in_the_symptoms_shows_the_rows_with_these_words(visit):
    page = visit("search.html")
    first, *_ = found_by(page, "ChildFailedError")
    assert first == f"{SYMPTOMS}#find=ChildFailedError"
    page.locator("ul.search li > a").first.click()
    page.wait_for_selector("form.filter")
    assert 0 < page.locator("tbody tr:visible").count() < 10
