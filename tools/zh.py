"""`make zh`: carry the English texts over to their Chinese translations.

Beside X.ipynb or X.md may stand its translation, X.zh-CN.ipynb or X.zh-CN.md. A
notebook's cells are its blocks; a page's are paragraphs, headings, items and rows of
tables. Code, outputs and all that has no words is copied. Each other Chinese block has
a stamp: the hash of the English block that it translates, and its own. Stamps are in
the metadata of cells, and at the end of a page. A block whose English has changed says
that it is out of date, and since when, with the English text below it, and a new one is
in English. Only a person's word ends that: --same, or a new text by --import.

python -m tools.zh [--new ENGLISH] [--same PLACE] [CHINESE ...]
python -m tools.zh --export CHINESE > FILE
python -m tools.zh --import CHINESE < FILE
"""

import argparse
import copy
import dataclasses
import datetime
import difflib
import functools
import hashlib
import re
import sys
from collections import Counter
from pathlib import Path

import nbformat

from harness.stages import ROOT
from harness.stages import fail
from harness.stages import known_files
from harness.stages import stages
from tools import picture
from tools.notebooks import write as write_notebook

CHINESE = ".zh-CN"
TODO = "（待翻译）"
HAN = "[\u4e00-\u9fff]"


# ---- blocks --------------------------------------------------------------------------
@dataclasses.dataclass
class Block:
    text: str
    copied: bool  # as it is in English
    stamp: tuple = ()  # hashes of the English text that this translates, and of this
    since: str = ""  # the day since which it is out of date
    noticed: str = ""  # then the text with the notice that says so
    generated: bool = False  # by tools/pages.py
    cell: object = None  # of a notebook
    end: str = ""  # the white space after it, on a page


def hashed(text):
    return hashlib.sha256(text.encode()).hexdigest()[:8]


FENCE = re.compile(r"^ *(```+|~~~+).*?^ *\1 *$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"``.+?``|`(?:[^`\n]|\n(?!\n))+`")
TAG = re.compile(r"<!--.*?-->|</?\w[^>]*>", re.DOTALL)
LINK = re.compile(r"(?<=\]\()[^()\s]+(?=[^()]*\))")
NOTICE = re.compile(
    r"(?:<br>|\n> )\*\*译文自 ([\d-]+) 起过时，以英文为准：\*\*.*", re.DOTALL
)
STAMPS = re.compile(r"\n<!-- translated, see tools/zh.py\n(.*)-->\n\Z", re.DOTALL)


def prose(text, code="`x`"):
    """Return a text without fences, tags and targets of links; `code` for the code."""
    text = TAG.sub("", CODE.sub(code, FENCE.sub("", text)))
    return re.sub(r"\]\([^()]*\)", "]", text)


def split(page):
    """Return the blocks of a page's text, each with the white space after it."""
    parts, fence = [], None
    for line in page.splitlines(keepends=True):
        mark = re.match(r" *(```+|~~~+)", line)
        begins = not fence and (
            not parts
            or mark
            or re.match(r" *(?:\||[-*] |\d+\. |#+ )", line)
            or (parts[-1].endswith(("\n\n", "```\n")) and line.strip())
        )
        if mark:
            fence = None if fence == mark[1] else fence or mark[1]
        if begins:
            parts.append(line)
        else:
            parts[-1] += line
    texts = [part.rstrip("\n") for part in parts]
    ends = [part[len(text) :] for part, text in zip(parts, texts, strict=True)]
    return [
        Block(text, not re.search(f"[a-zA-Z]{{2}}|{HAN}", prose(text)), end=end)
        for text, end in zip(texts, ends, strict=True)
    ]


def read(path):
    """Return the blocks of a notebook or a page.

    Raises ValueError if a page has fewer or more than it had.
    """
    if path.suffix == ".ipynb":
        found = []
        for cell in nbformat.read(path, as_version=4).cells:
            stamp = tuple(cell.metadata.pop("translates", "").split())
            is_code = cell.cell_type != "markdown"
            found.append(Block(cell.source, is_code, stamp, cell=cell))
            take_notice(found[-1])
        return found
    text = path.read_text()
    stamps = STAMPS.search(text)
    blocks = split(text[: stamps.start()] if stamps else text)
    generated = False
    for block in blocks:
        generated = block.text.startswith("<!-- stages") or (
            generated and not block.text.startswith("<!-- end of stages")
        )
        block.generated = generated
        take_notice(block)
    if stamps:
        lines = stamps[1].splitlines()
        if len(lines) != len(blocks):
            raise ValueError(
                f"{path}: {len(blocks)} blocks, but it had {len(lines)}: {SPLIT}"
            )
        for block, line in zip(blocks, lines, strict=True):
            block.stamp = tuple(line.split())
    return blocks


SPLIT = "neither split nor join paragraphs, items and rows of a page"


def with_notice(text, english, path, since):
    """Return a Chinese text, and below it that it is out of date, and the English one.

    path: that of the English text. In a row of a table, all this is in the last cell.
    """
    says = f"**译文自 {since} 起过时，以英文为准：**"
    english = LINK.sub(lambda match: in_chinese(match[0], path), english)
    if text.lstrip().startswith("|"):
        words = " · ".join(
            cell.strip() for cell in english.strip().strip("|").split("|")
        )
        return f"{text.rstrip().removesuffix('|').rstrip()}<br>{says} {words} |"
    english = re.sub("^#+ (.*)", r"**\1**", english, flags=re.MULTILINE)
    lines = [f"> {line}".rstrip() for line in english.splitlines()]
    return "\n".join([text, f"> {says}", ">", *lines])


def take_notice(block):
    """Take the notice of an outdated block out of its text, into its other fields."""
    if not block.copied and (notice := NOTICE.search(block.text)):
        block.since, block.noticed = notice[1], block.text
        end = " |" if notice[0].startswith("<br>") else ""
        block.text = block.text[: notice.start()] + end


def write(path, blocks):
    if path.suffix == ".ipynb":
        cells = []
        for block in blocks:
            cells.append(cell := copy.deepcopy(block.cell))
            cell.source = block.noticed or block.text
            if block.stamp and not block.copied:
                cell.metadata["translates"] = " ".join(block.stamp)
        book = nbformat.v4.new_notebook(cells=cells)
        write_notebook(book, path)
    else:
        text = "".join((block.noticed or block.text) + block.end for block in blocks)
        stamps = "".join(" ".join(block.stamp) + "\n" for block in blocks)
        path.write_text(f"{text}\n<!-- translated, see tools/zh.py\n{stamps}-->\n")


def english_of(path):
    return path.with_name(path.name.replace(CHINESE, ""))


def chinese_of(path):
    return path.with_name(path.stem + CHINESE + path.suffix)


def translations():
    """Return the paths of the Chinese texts."""
    names = [ROOT / n for n in known_files() if f"{CHINESE}." in n]
    return [path for path in names if path.suffix in (".ipynb", ".md")]


# ---- links ---------------------------------------------------------------------------
def slug(heading):
    """Return the anchor that GitHub and the site give to a heading."""
    heading = re.sub(r"\]\([^)]*\)|[`*\[]", "", heading)
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def headings(text):
    """Return [(level, heading)] of a text."""
    found = re.findall(r"^(#{1,6}) +(.+)", FENCE.sub("", text), re.MULTILINE)
    return [(len(level), words.strip()) for level, words in found]


@functools.cache
def anchors_when(path, _changed):
    blocks = [block for block in read(path) if not (block.cell and block.copied)]
    return [slug(words) for block in blocks for _, words in headings(block.text)]


def anchors(path):
    return anchors_when(path, path.stat().st_mtime_ns)


def in_chinese(target, english):
    """Return where a link of an English text leads in its translation.

    A target that is Chinese already is returned as it is, if it is there. A text that
    leads to its translation is led to by that.
    """
    if target in (english.name, chinese_of(english).name):
        return english.name
    name, _, anchor = target.partition("#")
    if ":" in name:
        return target
    page = english_of(english.parent / name) if name else english
    if page.suffix == ".png" and chinese_of(page).is_file():
        return f"{name.rpartition('/')[0]}/{chinese_of(page).name}".lstrip("/")
    if page.suffix not in (".ipynb", ".md") or not chinese_of(page).is_file():
        return target.replace(CHINESE, "")
    ours = anchors(chinese_of(page))
    if anchor not in ours and page.is_file() and anchor in (theirs := anchors(page)):
        anchor = ours[theirs.index(anchor)] if len(ours) == len(theirs) else anchor
    folder = name.rpartition("/")[0]
    name = name and f"{folder}/{chinese_of(page).name}".lstrip("/")
    return name + ("#" + anchor if anchor else "")


def links(text):
    return LINK.findall(CODE.sub("", FENCE.sub("", text)))


def relinked(text, original, english):
    """Return a Chinese text with its links as those of the English one require."""
    text = LINK.sub(lambda match: in_chinese(match[0], english), text)
    wanted = Counter(in_chinese(target, english) for target in links(original))
    found = Counter(links(text))
    for wrong in found - wanted:  # a heading there has a new name: if it is clear which
        file = wrong.partition("#")[0]
        right = [one for one in wanted - found if one.partition("#")[0] == file]
        if len(right) == 1:
            text = text.replace(f"]({wrong})", f"]({right[0]})")
    return text


def relinked_front_page(text):
    """Return the Chinese README's text with links to what is translated."""
    return LINK.sub(lambda match: in_chinese(match[0], ROOT / "README.md"), text)


# ---- make zh -------------------------------------------------------------------------
def facts(text):
    """Return what is the same in both languages, counted."""
    targets = [re.sub("#.*", "#", one.replace(CHINESE, "")) for one in links(text)]
    return Counter(codes(text) + numbers(text) + targets)


def pairs(english, chinese):
    """Return {number of an English block: that of the Chinese block for it}."""
    if not any(block.stamp for block in chinese):  # made without this program
        if len(english) != len(chinese):
            raise ValueError(
                f"{len(chinese)} blocks for {len(english)} English ones: {SPLIT}"
            )
        return {n: n for n in range(len(english))}
    theirs = [hashed(block.text) for block in english]
    ours = [block.stamp[0] if block.stamp else hashed(block.text) for block in chinese]
    found = {}
    for n, of_english in enumerate(theirs):  # wherever it is now
        if of_english in ours:
            found[n] = ours.index(of_english)
            ours[found[n]] = f"{of_english} found"
    theirs = [f"{one} found" if n in found else one for n, one in enumerate(theirs)]
    matcher = difflib.SequenceMatcher(None, theirs, ours, autojunk=False)
    for kind, a, b, c, d in matcher.get_opcodes():
        if kind == "equal":
            continue
        # Changed English: of unequal numbers those that have most in common.
        ones = [n for n in range(a, b) if not english[n].copied and n not in found]
        others = [n for n in range(c, d) if not chinese[n].copied]
        others = [n for n in others if n not in found.values()]
        ones = [(n, facts(english[n].text)) for n in ones]
        others = [(n, facts(chinese[n].text)) for n in others]
        if len(ones) <= len(others):
            found |= matched(ones, others)
        else:
            found |= {one: other for other, one in matched(others, ones).items()}
    return found


def matched(few, many):
    """Return {number: that of the one with most in common}, in order, for all of few.

    few, many: lists of (number, facts); the second one is as long, or longer.
    """
    found = {}
    for n, (one, its_facts) in enumerate(few):
        window = many[: len(many) - (len(few) - n - 1)]
        common = [(its_facts & others).total() for _, others in window]
        best = common.index(max(common))
        found[one] = window[best][0]
        many = many[best + 1 :]
    return found


def pictures(cell):
    """Return the outputs of a cell that are pictures which can be drawn again."""
    outputs = (cell or {}).get("outputs", [])
    return [output for output in outputs if picture.drawn_by(output)]


def with_chinese_pictures(cell, known):
    """Return an English cell with its pictures drawn in Chinese.

    known: {stamp: picture} that need not be drawn.
    """
    cell = copy.deepcopy(cell)
    for output in pictures(cell):
        stamp = picture.stamp(output)
        output.metadata["translates"] = stamp
        png = known.get(stamp) or picture.png(output, chinese=True)
        output.data["image/png"] = png
    return cell


def without_pictures(cell):
    """Return a cell, of either language, with stamps in place of its pictures."""
    cell = copy.deepcopy(cell)
    for output in pictures(cell):
        stamp = output.metadata.pop("translates", None) or picture.stamp(output)
        output.data["image/png"] = stamp
    return cell


def update(path, same=()):
    """Bring a translation up to date with the English text, as far as a program can.

    same: the numbers of the blocks whose Chinese is right for the changed English.
    """
    today = datetime.date.today().isoformat()
    english_path = english_of(path)
    english = read(english_path)
    chinese = read(path) if path.is_file() else []
    pair = pairs(english, chinese) if chinese else {}
    for n in sorted({*range(len(chinese))} - {*pair.values()}):
        if not chinese[n].copied:
            print(f"{shown(path)}: removed: {chinese[n].text!r}", file=sys.stderr)
    drawn = [one for block in chinese for one in pictures(block.cell)]
    known = {one.metadata.get("translates"): one.data["image/png"] for one in drawn}
    new = []
    for n, theirs in enumerate(english):
        ours, now = copy.copy(theirs), hashed(theirs.text)
        new.append(ours)
        old = chinese[pair[n]] if n in pair else None
        if theirs.copied:
            ours.stamp = (now, now)
            ours.cell = with_chinese_pictures(theirs.cell, known)
            continue
        before, own = old.stamp if old and old.stamp else ("", "")
        edited = old and hashed(old.text) != own
        if not old or (is_todo(old.text) and not edited):
            mark = re.match(r" *(?:\| ?|[-*] |\d+\. |#+ )?", theirs.text)[0]
            ours.text = mark + TODO + theirs.text[len(mark) :]
            ours.stamp = (now, hashed(ours.text))
            continue
        ours.text = old.text
        if n in same or theirs.generated or not before:
            before = now
        if before == now:
            ours.text = relinked(ours.text, theirs.text, english_path)
        else:
            ours.since = old.since or today
            ours.noticed = with_notice(ours.text, theirs.text, english_path, ours.since)
        ours.stamp = (before, hashed(ours.text))
    write(path, new)


def is_todo(text):
    return TODO in text


def shown(path):
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path


# ---- what is checked -----------------------------------------------------------------
# Headings that all notebooks have.
HEADINGS = {
    "The idea": "思路",
    "What changed": "改了什么",
    "Run it": "运行",
    "Prove it": "验证",
    "Break it": "踩坑",
    "Your turn": "练习",
    "Where next": "下一步",
    "What was not run here": "哪些没有在这里运行",
    "1. Flags": "1. 命令行参数",
    "2. Processes": "2. 进程",
    "3. Data": "3. 数据",
    "4. One training epoch": "4. 训练一个 epoch",
    "5. Evaluation": "5. 评估",
    "6. The run": "6. 主流程",
}
FULL = "[，。；：！？、（）“”《》]"
TYPOGRAPHY = {
    "no space between Chinese and Latin": (
        rf"{HAN}[*\[]*[A-Za-z0-9`]|[A-Za-z0-9`][*\]]*{HAN}"
    ),
    "half-width punctuation": (
        rf"{HAN}[*\]]*[,;:!?]|{HAN}[*\]]*\.(?=\s|$)|{HAN} ?\(|\) ?{HAN}"
        rf"|\"[^\"\n]*{HAN}"
    ),
    "a space beside full-width punctuation": (
        rf"(?<![-|.>#+*\s]) {FULL}|{FULL} +(?=[^|\s])"
    ),
    "two spaces": r"(?<=[^\s|])  +(?=[^\s|])",
    "a comma in a numeral": r"\d,\d{3}(?!\d)",
    "italics": r"(?<![*\w\\])\*(?![*\s])[^*\n]+(?<![\s*])\*(?!\*)",
    "a line break in a paragraph": (
        rf"(?:{HAN}|[，。；：、）])\n *(?!\d+\. )(?:{HAN}|[（“A-Za-z0-9`\[])"
    ),
}
UNITS = {"thousand": 3, "million": 6, "billion": 9}
UNITS |= {"千": 3, "万": 4, "百万": 6, "千万": 7, "亿": 8, "十亿": 9}


def numbers(text):
    """Return the numbers in a text's prose: `3.4 million` and `340 万` are equal."""
    text = re.sub(r"(?<=\d),(?=\d{3})", "", prose(text))
    units = "|".join(sorted(UNITS, key=len, reverse=True))
    pattern = rf"(?<![\w.])(\d+(?:\.\d+)*(?:e-?\d+)?)(?:(?: ?|\n *)({units}))?"
    found = []
    for number, unit in re.findall(pattern, text, re.ASCII):
        if unit and number.count(".") < 2:
            number = f"{float(number) * 10 ** UNITS[unit]:.12g}"
        found.append(number)
    return found


def fences(text):
    return [match[0] for match in FENCE.finditer(text)]


def codes(text):
    """Return what stands in `this type`, each in one line."""
    return [" ".join(one.split()) for one in CODE.findall(FENCE.sub("", text))]


def columns(text):
    """Return how many columns each row of the tables in a text has."""
    rows = re.findall(r"^\|.*", FENCE.sub("", text), re.MULTILINE)
    return [len(re.split(r"(?<!\\)\|", row)) for row in rows]


def typography(text):
    """Return what is wrong in how a Chinese text is set: (kind, where)."""
    text = prose(text)
    for kind, pattern in TYPOGRAPHY.items():
        for match in re.finditer(pattern, text):
            around = text[max(match.start() - 8, 0) : match.end() + 8]
            yield kind, around.replace("\n", "⏎")
    for line in text.splitlines():
        for bold in re.findall(r"\*\*(.+?)\*\*", line):
            if re.search(rf"^{FULL}|(?:{FULL}|[,.;:!?])$", bold):
                yield "punctuation inside bold", bold


def compared(theirs, ours, english):
    """Return what is wrong with a Chinese block, given its English one."""
    for name, part in (
        ("headings", lambda text: [level for level, _ in headings(text)]),
        ("blocks of code", fences),
        ("columns of tables", columns),
    ):
        if part(theirs) != part(ours):
            yield f"{name}: {part(theirs)} in English, here {part(ours)}"
    titles = zip(headings(theirs), headings(ours), strict=False)
    for (_, one), (_, other) in titles:
        if HEADINGS.get(one, other) != other:
            yield f"the heading {other} is {HEADINGS[one]} in all texts"
    for name, part in (("number", numbers), ("code", codes)):
        missing = Counter(part(theirs)) - Counter(part(ours))
        for one in missing.elements():
            yield f"{name} missing: {one}"
    wanted = Counter(in_chinese(target, english) for target in links(theirs))
    found = Counter(links(ours))
    yield from (f"link missing: {one}" for one in wanted - found)
    yield from (f"link too many: {one}" for one in found - wanted)
    for kind, where in typography(ours):
        yield f"{kind}: {where}"
    for line in re.sub(r"\[[^]]*\]", "", prose(ours, "")).splitlines():
        if len(line) > 60 and len(re.findall(HAN, line)) < len(line) / 5:
            yield f"English: {line[:60]}"


def left(path):
    """Return what a person may translate in a translation, each as a line."""
    found = []
    for n, (theirs, ours) in enumerate(
        zip(read(english_of(path)), read(path), strict=True)
    ):
        state = f"out of date since {ours.since}" if ours.since else ""
        if not ours.copied and is_todo(ours.text):
            state = "not translated"
        if state:
            first = " ".join(theirs.text.split())[:60]
            found.append(f"{shown(path)}: {n:02}: {state}: {first}")
    return found


def problems(path):
    """Return what is wrong with a translation, each as a line.

    What is out of date, or not translated, and says so, is not wrong.
    """
    english, chinese = read(english_of(path)), read(path)
    found = []

    def say(text, n=None):
        found.append(f"{shown(path)}: " + (f"{n:02}: " if n is not None else "") + text)

    if len(english) != len(chinese):
        say(f"{len(chinese)} blocks, the English has {len(english)}: type `make zh`")
        return found
    for n, (theirs, ours) in enumerate(zip(english, chinese, strict=True)):
        # Of a cell that is translated: all but its text.
        cells = (without_pictures(block.cell) for block in (theirs, ours))
        one, other = ({**(cell or {}), "source": ""} for cell in cells)
        if one != other or theirs.copied and theirs.text != ours.text:
            say("code, outputs or metadata differ: type `make zh`", n)
        if theirs.copied:
            continue
        if is_todo(ours.text):
            continue
        if not ours.stamp or ours.stamp[1] != hashed(ours.text):
            say("the Chinese has changed: type `make zh`", n)
        if outdated := bool(ours.stamp) and ours.stamp[0] != hashed(theirs.text):
            parts = ours.text, theirs.text, english_of(path), ours.since
            if not ours.since or ours.noticed != with_notice(*parts):
                say("the English has changed: type `make zh`", n)
        elif ours.since:
            say("it is up to date: type `make zh`", n)
        if outdated:
            continue
        for wrong in compared(theirs.text, ours.text, english_of(path)):
            say(wrong, n)
        for target in links(ours.text):
            name, _, anchor = target.partition("#")
            page = path.parent / name if name else path
            known = page.suffix in (".ipynb", ".md") and page.is_file()
            if anchor and known and anchor not in anchors(page):
                say(f"there is no heading {target}", n)
    for anchor, times in Counter(anchors(path)).items():
        if times > 1 and anchors(english_of(path)).count(anchor) < times:
            say(f"{times} headings with the anchor {anchor}")
    return found


# ---- as plain text -------------------------------------------------------------------
MARK = re.compile(r"^=== (\d+) .*\n", re.MULTILINE)


def export(path):
    """Return a translation as plain text; of what is out of date, the English, too."""
    english, text = read(english_of(path)), ""
    for n, block in enumerate(read(path)):
        state = "is copied; leave it" if block.copied else "translate"
        if not block.copied and not is_todo(block.text):
            state = "is translated"
            if block.since:
                state = (
                    f"is out of date; in English:\n{english[n].text}\n=== {n:02} now"
                )
        text += f"=== {n:02} {state}\n{block.text}\n"
    return text


def import_(path, text):
    """Put the blocks of such a text that are not copied into a translation.

    Returns the numbers of those that are new: they translate the English as it is.
    """
    blocks, changed = read(path), []
    _, *parts = MARK.split(text)
    texts = dict(zip(map(int, parts[::2]), parts[1::2], strict=True))  # the last ones
    for number, new in texts.items():
        block, new = blocks[number], new.strip("\n")
        if not block.copied and block.text != new:
            block.text, block.noticed = new, ""
            changed.append(number)
    write(path, blocks)
    return changed


# ---- the program ---------------------------------------------------------------------
def carry_over(paths, same=()):
    """Bring translations up to date; return what may be translated, and what is wrong.

    same: (path, number) of blocks whose Chinese is right for the changed English.
    """
    for path in paths:
        update(path, [n for file, n in same if file == path])
    for path in paths:  # the headings are known now
        update(path)
    waiting = [line for path in paths for line in left(path)]
    return waiting, [problem for path in paths for problem in problems(path)]


def place(text):
    """Return (path, number) for 03:12, or for NAME.ipynb:12, English or Chinese."""
    name, _, number = text.rpartition(":")
    stage = next((stage for stage in stages() if stage[:2] == name), None)
    path = english_of(Path(f"{stage}/{stage}.ipynb" if stage else name).resolve())
    if not number.isdigit() or not chinese_of(path).is_file():
        fail(f"{text}: such a place is 03:12, or docs/first_aid.md:12")
    return chinese_of(path), int(number)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--new", action="append", default=[], type=Path)
    parser.add_argument("--same", action="append", default=[], type=place)
    parser.add_argument("--export", type=Path)
    parser.add_argument("--import", type=Path, dest="import_")
    parser.add_argument("chinese", nargs="*", type=Path)
    args = parser.parse_args()
    if args.export:
        update(args.export)
        print(export(args.export), end="")
        return
    chosen = [path.resolve() for path in args.chinese]
    if args.import_:
        chosen = [args.import_.resolve()]
        args.same += [(chosen[0], n) for n in import_(chosen[0], sys.stdin.read())]
    for path in map(Path.resolve, args.new):
        if not path.is_file() or CHINESE in path.name:
            fail(f"there is no English text {path}")
        update(chinese_of(path))
        chosen.append(chinese_of(path))
    paths = chosen or translations()
    waiting, wrong = carry_over(paths, args.same)
    print("\n".join([*waiting, *wrong]) or f"up to date: {len(paths)}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        fail(error)
