"""Draws the pictures of docs/, and those of notebooks again.

A notebook's output keeps what its picture was drawn from (nbtools/drawing.py). Where
nothing has changed to the eye, the stored picture stays as it is.
"""

import base64
import io
import json
from importlib import import_module

import matplotlib

matplotlib.use("Agg")  # a file, on a machine without a screen

import matplotlib.pyplot as plt
from IPython.core.pylabtools import print_figure
from PIL import Image

from docs import figures
from harness.stages import ROOT

STEP = import_module("03_ddp_launch.figures").ddp_step_on_four_gpus.__wrapped__
# of docs/: the function that draws it, and its arguments
PICTURES = {
    "ddp_step": (STEP, {"narrow": True}),
    "what_can_be_split": (figures.seven_ways, {}),
}


def png(draw, arguments, **options):
    """Return what a function draws, as the bytes of a PNG."""
    draw(**arguments)
    data = print_figure(plt.gcf(), "png", **options)
    plt.close()
    return data


def pixels(data):
    """Return the size and the pixels of a PNG."""
    with Image.open(io.BytesIO(data)) as image:
        return image.size, image.convert("RGB").tobytes()


def version(data):
    """Return which program stored a PNG."""
    with Image.open(io.BytesIO(data)) as image:
        return image.text["Software"]


def newer(stored, drawn):
    """Return a PNG as it is drawn now; the stored one if they look the same."""
    return stored if pixels(stored) == pixels(drawn) else drawn


def of_docs():
    """Yield (path, PNG as it is drawn now) for the pictures of docs/."""
    for name, (draw, arguments) in PICTURES.items():
        yield ROOT / f"docs/{name}.png", png(draw, arguments, dpi=110)


def draw_all():
    """Draw the pictures of docs/."""
    for path, now in of_docs():
        path.write_bytes(newer(path.read_bytes(), now) if path.is_file() else now)


# ---- of notebooks --------------------------------------------------------------------
def drawn_by(output):
    """Return (function, arguments) of a notebook's output, or None if none is kept."""
    kept = output.get("metadata", {})
    if "picture" not in kept:
        return None
    path, _, name = kept["picture"].partition(":")
    module = import_module(path.removesuffix(".py").replace("/", "."))
    return getattr(module, name).__wrapped__, json.loads(kept["arguments"])


def stored_in(output):
    """Return the picture of a notebook's output, as the bytes of a PNG."""
    return base64.b64decode(output["data"]["image/png"])


def drawn_now(output):
    """Return a notebook's picture as it is drawn now, in base64 as it stores it."""
    stored = output["data"]["image/png"]
    before = stored_in(output)
    now = newer(before, png(*drawn_by(output)))
    return stored if now == before else base64.encodebytes(now).decode()
