"""Draws the pictures of notebooks and pages with Chinese labels, for the Chinese site.

docs/locale/zh_CN/LC_MESSAGES/pictures.po has the labels; those that it lacks stay in
English. Sphinx finds docs/NAME.png by its name, and a notebook's picture by the SHA-256
of the English one, so a picture that has changed cannot be shown with an old one.

python tools/site/pictures.py
"""

import hashlib
import json
import logging
import re
import sys
from pathlib import Path

import matplotlib
from babel.messages import pofile
from matplotlib import font_manager
from matplotlib import pyplot as plt
from matplotlib.text import Text

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from harness.stages import notebooks
from tools import picture

LOCALE = ROOT / "docs/locale/zh_CN"
FONTS = (
    *("Noto Sans CJK SC", "Source Han Sans SC", "WenQuanYi Micro Hei"),
    *("WenQuanYi Zen Hei", "PingFang SC", "Hiragino Sans GB", "Microsoft YaHei"),
    *("SimHei", "Noto Sans CJK JP"),
)


def chinese_font():
    """Return the first of FONTS that is installed, or None."""
    installed = {*font_manager.get_font_names()}
    return next((name for name in FONTS if name in installed), None)


def labels():
    """Return [(pattern, Chinese)], those of the most letters first."""
    with (LOCALE / "LC_MESSAGES/pictures.po").open("rb") as file:
        known = [one for one in pofile.read_po(file) if one.id]
    known.sort(key=lambda one: -len(one.id.replace("{}", "")))
    return [(re.escape(m.id).replace(r"\{\}", "(.+)"), m.string) for m in known]


def in_chinese(label, known):
    """Return a label in Chinese; {} stands for any text."""
    for pattern, chinese in known:
        if match := re.fullmatch(pattern, label):
            return chinese.format(*match.groups())
    return label


def translated(draw, known):
    """Return a function that draws the same picture with Chinese labels."""

    def draw_in_chinese(**arguments):
        draw(**arguments)
        figure = plt.gcf()
        for axes in figure.axes:
            for axis in (axes.xaxis, axes.yaxis):
                before = [label.get_text() for label in axis.get_ticklabels()]
                after = [in_chinese(label, known) for label in before]
                if after != before:
                    axis.set_ticklabels(after)
        for text in figure.findobj(Text):
            chinese = in_chinese(text.get_text(), known)
            if chinese != text.get_text():
                # Most Chinese fonts have no bold: only the Latin letters would be.
                text.set(text=chinese, weight="normal")

    return draw_in_chinese


def main():
    font = chinese_font()
    if not font:
        print("no Chinese font: pictures stay in English (apt: fonts-wqy-microhei)")
        return
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
    folder, known = LOCALE / "pictures", labels()
    folder.mkdir(exist_ok=True)
    found = {f"{name}.png": by for name, by in picture.PICTURES.items()}
    for path in notebooks():
        for cell in json.loads(path.read_text())["cells"]:
            for output in filter(picture.drawn_by, cell.get("outputs", [])):
                name = hashlib.sha256(picture.stored_in(output)).hexdigest()
                found[f"{name}.png"] = picture.drawn_by(output)
    for path in folder.iterdir():
        if path.name not in found:
            path.unlink()
    for name, (draw, arguments) in found.items():
        with matplotlib.rc_context({"font.family": ["DejaVu Sans", font]}):
            data = picture.png(translated(draw, known), arguments)
        (folder / name).write_bytes(data)
    print(f"{len(found)} pictures with Chinese labels")


if __name__ == "__main__":
    main()
