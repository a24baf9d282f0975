"""The Chinese texts say what the English ones say, as far as a program can see.

What is out of date says so, which tools/zh.py explains.
"""

import datetime
import json
import os
import re
from importlib import import_module

import nbformat
import pytest

from harness.stages import ROOT
from harness.stages import first_with
from nbtools import drawing
from tools import picture
from tools import zh
from tools.notebooks import write as write_notebook

TODAY = datetime.date.today().isoformat()


# ---- the notebooks and pages ---------------------------------------------------------
@pytest.mark.parametrize(
    "path", zh.translations(), ids=lambda path: path.relative_to(ROOT).as_posix()
)
def test_a_translation_is_that_of_the_english_text_as_it_is(path):
    assert zh.problems(path) == []


def test_there_are_translations_and_each_has_its_english_text():
    paths = zh.translations()
    assert len(paths) >= 30 and ROOT / "README.zh-CN.md" in paths
    assert [path for path in paths if not zh.english_of(path).is_file()] == []


def test_a_comment_explained_in_chinese_stands_in_the_code_shown():
    """Below a listing, with the sign of a diff and colors, or over two lines."""
    found = 0
    for path in (path for path in zh.translations() if path.suffix == ".ipynb"):
        cells = nbformat.read(path, 4).cells
        outputs = [one for cell in cells for one in cell.get("outputs", [])]
        printed = [one.get("text", "") for one in outputs]
        printed += [fence for cell in cells for fence in zh.fences(cell.source)]
        text = re.sub(r"\x1b\[\d*m", "", "\n".join(printed))
        text = re.sub(r"\n[-+ ]? *# ", " ", text)
        for cell in cells:
            for items in re.findall(r"注释的意思：\n\n((?:- .*\n?)+)", cell.source):
                for words in re.findall(r"^- `(.+?)`：", items, re.MULTILINE):
                    found += 1
                    for part in words.split(" ... "):
                        assert part in text, f"{path.name}: {part}"
    assert found >= 30


# ---- make zh -------------------------------------------------------------------------
TEXTS = [
    "# 03 · One\n\nIt has 50,000 images, on `cuda`. See [two](two.md#the-end).\n\n"
    "| a name | words |\n|---|---|\n| one | 2 |\n\n```\n$ ls\n```\n\n## Run it",
    "Wait for 3.4 million steps of rank 0. Then `ls` lists them, in **two** files,\n"
    "of 735\n  million bytes.",
    "The last cell.",
]
TRANSLATED = [
    "# 03 · 一\n\n在 `cuda` 上有 5 万张图像，见[二](two.md#the-end)。\n\n"
    "| 名称 | 说明 |\n|---|---|\n| 一 | 2 |\n\n```\n$ ls\n```\n\n## 运行",
    "等 rank 0 完成 340 万个 step，然后 `ls` 会列出**两个**文件（在同一目录），"
    "共 7.35 亿字节。",
    "最后一个 cell。",
]


def english_notebook(path, texts, codes=("x = 1", "x")):
    cells = []
    for n, text in enumerate(texts):
        cells.append(nbformat.v4.new_markdown_cell(text))
        if n < len(codes):
            out = nbformat.v4.new_output("stream", text="1\n")
            cells.append(nbformat.v4.new_code_cell(codes[n], outputs=[out]))
    write_notebook(nbformat.v4.new_notebook(cells=cells), path)


def translate(path, texts):
    """Write these texts into the cells of a notebook, or blocks of a page."""
    blocks = zh.read(path)
    words = iter(texts)
    for block in blocks:
        if not block.copied:
            block.text = next(words, block.text)
    zh.write(path, blocks)


@pytest.fixture
def notebook(tmp_path):
    """A notebook with its translation, up to date; and a page to which it links."""
    (tmp_path / "two.md").write_text("# Two\n\n## The end\n")
    english_notebook(tmp_path / "one.ipynb", TEXTS)
    path = tmp_path / "one.zh-CN.ipynb"
    zh.update(path)
    assert [line.split(": ")[2] for line in zh.left(path)] == ["not translated"] * 3
    assert zh.problems(path) == []
    translate(path, TRANSLATED)
    wrong = zh.problems(path)
    assert len(wrong) == 3 and all("Chinese has changed" in line for line in wrong)
    zh.update(path)
    assert zh.problems(path) == [] and zh.left(path) == []
    return path


def edit(path, old, new):
    """Replace a text in a file, as it stands in JSON if it is a notebook."""
    if path.suffix == ".ipynb":
        old, new = (json.dumps(one, ensure_ascii=False)[1:-1] for one in (old, new))
    assert path.read_text().count(old) == 1
    path.write_text(path.read_text().replace(old, new))


def in_cell(path, *edits):
    """Replace texts in a translation, and run `make zh`; return what is wrong then."""
    for old, new in edits:
        edit(path, old, new)
    zh.update(path)
    return [line.partition(": ")[2] for line in zh.problems(path)]


def test_a_translation_has_the_english_code_outputs_and_ids(notebook):
    both = [nbformat.read(p, 4) for p in (zh.english_of(notebook), notebook)]
    for one, other in zip(both[0].cells, both[1].cells, strict=True):
        assert one.id == other.id
        assert one == other or one.cell_type == "markdown"
        assert set(other.metadata) <= {"translates"}
    assert both[0].metadata == both[1].metadata


@pytest.mark.parametrize("part", ["source", "outputs", "tags"])
def test_changed_code_and_outputs_are_seen_and_copied(notebook, part):
    english = zh.english_of(notebook)
    book = nbformat.read(english, 4)
    cell = book.cells[3]
    if part == "source":
        cell.source = "x + 1"
    elif part == "outputs":
        cell.outputs[0].text = "2"
    else:
        cell.metadata["tags"] = ["check"]
    write_notebook(book, english)
    (line,) = zh.problems(notebook)
    assert "03: code, outputs or metadata differ" in line
    zh.update(notebook)
    assert zh.problems(notebook) == []
    assert nbformat.read(notebook, 4).cells[3] == cell


def test_changed_english_is_out_of_date_until_a_person_says_otherwise(notebook):
    english = zh.english_of(notebook)
    edit(english, "The last cell.", "## A title\n\nThe very [last](two.md) cell.")
    (line,) = zh.problems(notebook)
    assert line.endswith("04: the English has changed: type `make zh`")
    assert in_cell(notebook) == []
    (line,) = zh.left(notebook)
    assert f"04: out of date since {TODAY}: ## A title" in line
    cell = nbformat.read(notebook, 4).cells[4].source
    notice = f"> **译文自 {TODAY} 起过时，以英文为准：**\n>\n> **A title**\n>\n"
    assert cell == f"{TRANSLATED[2]}\n{notice}> The very [last](two.md) cell."
    before = notebook.read_text()
    assert in_cell(notebook) == [] and notebook.read_text() == before
    # The day stays, and a corrected typo makes nothing current; other English is shown.
    edit(notebook, TODAY, "2026-01-31")
    edit(notebook, "最后一个", "最末一个")
    assert in_cell(notebook) == []
    assert "out of date since 2026-01-31" in zh.left(notebook)[0]
    edit(english, "The very", "The very very")
    assert len(zh.problems(notebook)) == 1
    assert in_cell(notebook) == [] and "very very" in notebook.read_text()
    assert "The very very [last](two.md) cell.\n=== 04 now\n最末" in zh.export(notebook)
    zh.update(notebook, same=[2])
    assert len(zh.left(notebook)) == 1


@pytest.mark.parametrize("how", ["same", "import", "as before"])
def test_a_person_says_what_is_up_to_date_again(notebook, how):
    english = zh.english_of(notebook)
    edit(english, "The last cell.", "The very last cell.")
    assert in_cell(notebook) == [] and len(zh.left(notebook)) == 1
    if how == "same":
        zh.update(notebook, same=[4])
    elif how == "import":
        text = zh.export(notebook)
        assert zh.import_(notebook, text) == []
        changed = zh.import_(notebook, text.replace("最后一个", "最末一个"))
        assert changed == [4]
        zh.update(notebook, changed)
    else:
        edit(english, "The very last cell.", "The last cell.")
        (line,) = zh.problems(notebook)
        assert "it is up to date: type `make zh`" in line
        zh.update(notebook)
    assert zh.problems(notebook) == zh.left(notebook) == []
    assert "过时" not in notebook.read_text()


def test_new_english_cells_are_shown_and_those_gone_are_removed(notebook, capsys):
    english = zh.english_of(notebook)
    english_notebook(english, [TEXTS[0], "A new cell about `new`.", *TEXTS[1:]])
    assert "blocks" in zh.problems(notebook)[0]
    zh.update(notebook)
    assert zh.problems(notebook) == []
    assert [line.split(": ")[1] for line in zh.left(notebook)] == ["02"]
    assert [block.text for block in zh.read(notebook)][::2][2] == TRANSLATED[1]
    english_notebook(english, ["Another new cell.", *TEXTS[::2]])
    zh.update(notebook)
    texts = [block.text for block in zh.read(notebook) if not block.copied]
    assert texts == ["（待翻译）Another new cell.", *TRANSLATED[::2]]
    assert TRANSLATED[1] in capsys.readouterr().err


def test_of_changed_and_new_cells_the_changed_one_is_found_by_its_code(notebook):
    english = zh.english_of(notebook)
    changed = TEXTS[1].replace("Wait", "Wait again")
    english_notebook(english, [TEXTS[0], "A new cell.", changed, TEXTS[2]], ["x = 1"])
    zh.update(notebook)
    states = [line.split(": ")[1:3] for line in zh.left(notebook)]
    assert states[0] == ["02", "not translated"]
    assert states[1][0] == "03" and states[1][1].startswith("out of date")


def test_a_notebook_is_translated_as_plain_text(notebook):
    text = zh.export(notebook)
    assert "=== 03 is copied" in text and TRANSLATED[1] in text
    text = text.replace(TRANSLATED[2], "最后。\n").replace("x = 1", "x = 3")
    zh.import_(notebook, text)
    assert in_cell(notebook) == []
    assert (
        zh.read(notebook)[4].text == "最后。" and zh.read(notebook)[1].text == "x = 1"
    )


# One change each to the cells above, and what is then said of it.
BREAKS = {
    "a number": ("5 万", "几万", "number missing: 50000"),
    "another number": ("340 万", "34 万", "number missing: 3400000"),
    "a unit on the next line": ("7.35 亿", "7.35 万", "number missing: 735000000"),
    "code": ("`cuda` 上", "GPU 上", "code missing: `cuda`"),
    "a link": ("[二](two.md#the-end)", "别处", "link missing: two.md#the-end"),
    "another link": ("two.md#the-end", "2.md", "link missing: two.md#the-end"),
    "a link too many": ("340", "[340](two.md)", "link too many: two.md"),
    "a fence": ("$ ls", "$ ls -l", "blocks of code"),
    "a row": ("| 一 | 2 |\n", "2\n", "columns of tables"),
    "a column": ("| 一 | 2 |", "| 一 2 |", "columns of tables"),
    "a level": ("## 运行", "### 运行", "headings"),
    "a heading": ("## 运行", "## 跑", "the heading 跑 is 运行"),
    "twice": ("# 03 · 一", "# 运行", "2 headings"),
    "English": ("最后一个 cell。", f"{'word ' * 15}字。", "English: word"),
    "a space": ("最后一个 cell", "最后一个cell", "no space"),
    "a space at code": ("在 `cuda`", "在`cuda`", "no space"),
    "a space after": ("340 万", "340万", "no space"),
    "a comma": ("step，", "step 了,", "half-width"),
    "a point": ("cell。", "单元.", "half-width"),
    "parentheses": ("（在同一目录）", "(在同一目录)", "half-width"),
    "quotes": ("最后一个", '"最后"一个', "half-width"),
    "a space beside": ("step，", "step， ", "full-width"),
    "two spaces": ("等 rank", "等  rank", "two spaces"),
    "a numeral": ("5 万张", "50,000 张", "a comma in a numeral"),
    "italics": ("最后一个", "*最后*一个", "italics"),
    "bold": ("**两个**", "**两个，**", "punctuation inside bold"),
    "a line": ("，然后", "，\n然后", "a line break"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_what_is_wrong_in_a_translation_is_said(notebook, name):
    old, new, wanted = BREAKS[name]
    found = in_cell(notebook, (old, new))
    assert any(wanted in line for line in found), found
    assert len(found) <= 2, found


PAGE = """# Two

Words of `this
long` page: 3.

## The end

| what | do |
|---|---|
| it hangs | wait |
| it fails | see [above](#two) |

```
$ a command

$ another
```

- an item
- [another](one.ipynb#run-it)
"""
OURS = """# 二

`this long` 页有 3 个词。

## 结尾

| 现象 | 做法 |
|---|---|
| 卡住 | 等待 |
| 报错 | 见[上文](#two) |

```
$ a command

$ another
```

- 一项
- [另一项](one.ipynb#run-it)
"""


def test_a_page_is_the_same_by_paragraphs_rows_and_items(tmp_path):
    english, path = tmp_path / "two.md", tmp_path / "two.zh-CN.md"
    english_notebook(tmp_path / "one.ipynb", TEXTS)
    english.write_text(PAGE)
    assert "".join(block.text + block.end for block in zh.split(PAGE)) == PAGE
    zh.update(path)
    assert len(zh.left(path)) == 8 and zh.problems(path) == []
    path.write_text(OURS)
    zh.update(path)
    assert zh.problems(path) == []
    assert path.read_text().startswith(OURS.replace("#two", "#二"))
    assert path.read_text().endswith("-->\n")
    # A changed row is out of date, a new one is in English, and code is copied.
    row = "| it fails | see [above](#two) |"
    edit(english, row, f"| it ends | done |\n{row.replace('see', 'look')}")
    edit(english, "$ a command", "$ one")
    zh.update(path)
    assert zh.problems(path) == []
    states = [line.split(": ")[1:3] for line in zh.left(path)]
    assert states == [["06", "not translated"], ["07", f"out of date since {TODAY}"]]
    text = path.read_text()
    assert "\n| （待翻译）it ends | done |\n" in text and "$ one\n" in text
    says = f"**译文自 {TODAY} 起过时，以英文为准：** it fails · look [above](#二) |"
    assert f"\n| 报错 | 见[上文](#二)<br>{says}\n" in text
    edit(path, "| （待翻译）it ends | done |", "| 结束 | 完成 |")
    edit(path, "| 报错 | 见", "| 报错 | 看")
    zh.update(path, same=[7])
    assert zh.problems(path) == zh.left(path) == []
    # The same number of blocks is what the stamps are found by.
    edit(path, "页有", "页\n\n有")
    with pytest.raises(ValueError, match="neither split nor join"):
        zh.update(path)


def test_links_lead_to_the_chinese_texts_and_to_their_headings(notebook):
    page = notebook.parent / "two.zh-CN.md"
    zh.update(page)  # a text more: links to it follow
    assert in_cell(notebook) == []
    page.write_text("# 二\n\n## 结尾\n")
    assert any("type" not in line for line in zh.problems(notebook))
    zh.update(page)
    assert in_cell(notebook) == []
    assert zh.links(zh.read(notebook)[0].text) == ["two.zh-CN.md#结尾"]
    edit(page, "结尾", "最后")  # its heading is reworded
    zh.update(page)
    assert any("two.zh-CN.md#结尾" in line for line in zh.problems(notebook))
    assert in_cell(notebook) == []
    assert zh.links(zh.read(notebook)[0].text) == ["two.zh-CN.md#最后"]
    edit(zh.english_of(page), "The end", "An end")  # what the English links to is gone
    edit(page, "最后", "完")
    wrong = [line for line in zh.problems(notebook) if "no heading" in line]
    assert len(wrong) == 1 and "two.zh-CN.md#最后" in wrong[0]


def test_a_place_is_a_stage_or_a_file_with_a_number(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    path = ROOT / "docs/questions.zh-CN.md"
    assert zh.place("docs/questions.md:2") == zh.place(f"{path}:2") == (path, 2)
    for wrong in ("99:1", "docs/questions.md", f"{first_with('images')}/x.ipynb:1"):
        with pytest.raises(SystemExit):
            zh.place(wrong)
        assert "such a place" in capsys.readouterr().err


# ---- pictures ------------------------------------------------------------------------
# Words in labels that are the same in Chinese: terms, names, and what a program prints.
SAME_WORDS = {
    *("rank", "rank's", "step", "batch", "epoch", "loss", "logits", "worker", "block"),
    *("all", "reduce", "gather", "scatter", "log", "softmax", "lr", "call", "last"),
    *("spawn", "torchrun", "srun", "slurmstepd", "python", "trap", "export", "sbatch"),
    *("autocast", "metadata", "dcp", "endpoint", "node", "machine", "interleaved"),
}


def labels_of(draw, options):
    """Return the labels of a picture as they are in English."""
    with drawing.drawn(draw, options):
        figure = drawing.plt.gcf()
        axes = [axis for each in figure.axes for axis in (each.xaxis, each.yaxis)]
        ticks = [label for axis in axes for label in axis.get_ticklabels()]
        found = {text.get_text() for text in drawing.labels(figure)}
        found |= {text.get_text() for text in ticks}
        drawing.plt.close()
    return found


def all_pictures():
    """Return (function, options) of each picture that has a Chinese twin."""
    books = [zh.english_of(p) for p in zh.translations() if p.suffix == ".ipynb"]
    cells = [cell for each in books for cell in nbformat.read(each, 4).cells]
    drawn = [picture.drawn_by(one) for cell in cells for one in zh.pictures(cell)]
    return drawn + [(draw, options) for draw, options, _ in picture.PICTURES.values()]


@pytest.mark.ci
def test_each_label_is_in_chinese_or_the_same_word_there():
    used, number = set(), 0
    for draw, options in all_pictures():
        table = drawing.table_of(draw)
        for label in labels_of(draw, options):
            chinese = drawing.in_chinese(label, table)
            if chinese != label:
                used.add(chinese)
                continue
            code = r"(?m)\$.*\$|^.*[(=].*$|\S*[_./\d]\S*|--\S+"  # and numbers, as TeX
            words = re.findall(r"\b[a-z][\w'-]{2,}", re.sub(code, "", label))
            words = {part for word in words for part in word.split("-")}
            assert words <= SAME_WORDS, f"{draw.__name__}: {label!r} is English"
        number += 1
    assert number > 40 and len(used) > 100


@pytest.fixture
def font():
    if not drawing.chinese_font():
        assert "REQUIRE_SITE" not in os.environ, picture.NO_FONT
        pytest.skip(picture.NO_FONT)


@pytest.mark.usefixtures("font")
def test_a_picture_is_drawn_in_chinese_once(notebook, monkeypatch):
    english = zh.english_of(notebook)
    book = nbformat.read(english, 4)
    kept = {"picture": "04_ddp_spawn/figures.py:a_parent_and_its_children"}
    kept["arguments"] = "{}"
    output = nbformat.v4.new_output(
        "display_data", metadata=kept, data={"image/png": ""}
    )
    output.data["image/png"] = picture.png(output)
    book.cells[3].outputs = [output]
    write_notebook(book, english)
    (line,) = zh.problems(notebook)
    assert "03: code, outputs or metadata differ" in line
    zh.update(notebook)
    assert zh.problems(notebook) == []
    (chinese,) = nbformat.read(notebook, 4).cells[3].outputs
    assert picture.pixels(chinese.data["image/png"]) != picture.pixels(
        output.data["image/png"]
    )
    before = notebook.read_text()
    with monkeypatch.context() as patch:
        patch.setattr(picture, "png", lambda *_, **__: pytest.fail("drawn again"))
        zh.update(notebook)
    assert notebook.read_text() == before
    # another label makes it stale
    table = picture.drawn_by(output)[0].__globals__["CHINESE"]
    monkeypatch.setitem(table, "spawn", "启动")
    assert len(zh.problems(notebook)) == 1
    zh.update(notebook)
    assert zh.problems(notebook) == [] and notebook.read_text() != before


@pytest.mark.usefixtures("font")
@pytest.mark.parametrize("name", ["04_ddp_spawn", "04_ddp_spawn.zh-CN"])
def test_a_notebook_draws_in_its_own_language(name, monkeypatch):
    words = []

    def display(figure, metadata):
        words.extend(label.get_text() for label in figure.findobj(drawing.Text))
        assert (
            metadata["picture"] == "04_ddp_spawn/figures.py:a_parent_and_its_children"
        )

    monkeypatch.setattr(drawing, "display", display)
    monkeypatch.setenv("JPY_SESSION_NAME", f"04_ddp_spawn/{name}.ipynb")  # by Jupyter
    import_module("04_ddp_spawn.figures").a_parent_and_its_children()
    assert words and any(map(re.compile(zh.HAN).search, words)) == ("zh-CN" in name)


@pytest.mark.usefixtures("font")
def test_a_character_that_the_font_lacks_is_no_box(monkeypatch):
    monkeypatch.setattr(drawing, "chinese_font", lambda: "DejaVu Sans")
    draw, options = all_pictures()[0]
    with picture.in_chinese(draw, options), pytest.raises(UserWarning, match="Glyph"):
        picture.print_figure(drawing.plt.gcf(), "png")
