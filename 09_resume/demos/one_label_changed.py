"""Run a script that trains on the digits, with one label changed since the last run.

torchrun --standalone --nproc-per-node=1 09_resume/demos/one_label_changed.py \
09_resume/train.py --device cpu --epochs 2 --checkpoint-dir checkpoints
"""

import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common import data

digits = data.digits


def changed_digits():
    """Return the digits, and the first training image with another label."""
    (images, labels), val = digits()
    labels[0] = (labels[0] + 1) % 10
    return (images, labels), val


data.digits = changed_digits
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
