"""Do what signal_in_step_36.py does, with loader workers that SIGTERM kills.

torchrun --standalone 10_preemption/demos/unprotected_workers.py TERM \
10_preemption/train.py --device cpu --epochs 2 --workers 1
"""

import os
import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import common.loader

common.loader.ignore_launcher_sigterm = None  # the script's worker_init_fn
os.environ["WAIT"] = "600"  # until torch notices that the worker is dead
runpy.run_path(str(Path(__file__).with_name("signal_in_step_36.py")))
