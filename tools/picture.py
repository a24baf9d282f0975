"""`make pages`, `make zh`: draw docs/*.png, and pictures with Chinese labels.

The former draws docs/*.png. Each stores a text, the source of what draws it, so that
a test can see whether it is stale. A notebook's output keeps what its picture was drawn
from (nbtools/drawing.py), and `make zh` draws it again from that.
"""

import base64
import contextlib
import functools
import hashlib
import importlib.util
import inspect
import io
import json
import logging
import warnings
from importlib import import_module

import matplotlib

matplotlib.use("Agg")  # a file, on a machine without a screen

import matplotlib.pyplot as plt
from IPython.core.pylabtools import print_figure
from PIL import Image

from docs import figures
from harness.stages import ROOT
from harness.stages import fail
from nbtools import drawing

NO_FONT = "no Chinese font is found; on Debian: apt-get install fonts-wqy-microhei"


@contextlib.contextmanager
def in_chinese(draw, options):
    """Draw a picture with Chinese labels. It is the current figure inside."""
    font = drawing.chinese_font() or fail(NO_FONT)
    # Many Chinese fonts have no bold characters.
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
    with drawing.drawn(draw, options, font), warnings.catch_warnings():
        # Otherwise a character that the font lacks is a box.
        warnings.filterwarnings("error", message="Glyph .* missing from")
        yield


# ---- of docs/ ------------------------------------------------------------------------
STEP = import_module("03_ddp_launch.figures").ddp_step_on_four_gpus.__wrapped__
# a picture: the function that draws it, with which options, and what has its source
PICTURES = {
    "ddp_step": (STEP, {"narrow": True}, STEP),
    "what_can_be_split": (figures.seven_ways, {}, figures),
}


def source(name):
    """Return the text that a picture of docs/ stores."""
    draw, _, part = PICTURES[name]
    return inspect.getsource(part) + json.dumps(drawing.table_of(draw))


def stored_text(path):
    """Return the text that is stored in a PNG, or None."""
    with Image.open(path) as picture:
        return picture.text.get("Description")


def paths(name):
    """Return the paths of a picture, in English and in Chinese."""
    return [ROOT / f"docs/{name}{language}.png" for language in ("", ".zh-CN")]


def draw_all():
    for name, (draw, options, _) in PICTURES.items():
        english, chinese = paths(name)
        with drawing.drawn(draw, options):
            save(english, source(name))
        with in_chinese(draw, options):
            save(chinese, source(name))


def save(path, text):
    """Save matplotlib's current figure as a PNG that stores a text, and close it."""
    stored = {"Software": None, "Description": text}
    plt.savefig(path, dpi=110, bbox_inches="tight", facecolor="white", metadata=stored)
    plt.close()


# ---- of notebooks --------------------------------------------------------------------
@functools.cache
def module(path):
    """Return the module of a file such as 03_ddp_launch/figures.py."""
    name = path.replace("/", ".").removesuffix(".py")
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def drawn_by(output):
    """Return (function, arguments) of a notebook's output, or None if none is kept."""
    kept = output.get("metadata", {})
    if "picture" not in kept:
        return None
    path, _, name = kept["picture"].partition(":")
    draw = getattr(module(path), name).__wrapped__
    return draw, json.loads(kept["arguments"])


def stamp(output):
    """Return what a Chinese picture is made from: the English one, and the labels."""
    draw, _ = drawn_by(output)
    parts = output["data"]["image/png"], json.dumps(drawing.table_of(draw))
    return hashlib.sha256("".join(parts).encode()).hexdigest()[:8]


def has_narrow(output):
    """Return whether a picture can be drawn for a phone."""
    drawn = drawn_by(output)
    return drawn is not None and "narrow" in inspect.signature(drawn[0]).parameters


def png(output, chinese=False, **more):
    """Return a notebook's picture, drawn again, as base64."""
    draw, arguments = drawn_by(output)
    with (in_chinese if chinese else drawing.drawn)(draw, arguments | more):
        text = print_figure(plt.gcf(), "png", base64=True)
        plt.close()
    return text


def pixels(text):
    """Return the size and the pixels of a PNG in base64."""
    with Image.open(io.BytesIO(base64.b64decode(text))) as image:
        return image.size, image.convert("RGB").tobytes()


def version(text):
    """Return which program stored a PNG in base64."""
    with Image.open(io.BytesIO(base64.b64decode(text))) as image:
        return image.text["Software"]


def drawn_now(output):
    """Return a notebook's picture as it is drawn now; the stored one if it is equal."""
    stored, now = output["data"]["image/png"], png(output)
    return stored if pixels(stored) == pixels(now) else now
