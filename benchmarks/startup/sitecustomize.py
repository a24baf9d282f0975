"""Python imports this first in the processes of a benchmark: see ../instrument.py."""

import json
import os
import sys

if "resource_tracker" not in str(sys.orig_argv):  # multiprocessing's; it has no torch
    from benchmarks.instrument import install

    install(**json.loads(os.environ["BENCHMARK"]))
