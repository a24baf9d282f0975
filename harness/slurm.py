"""A Slurm cluster on this machine: what tests and notebooks ask of it alike."""

import os
import re
import sys
from pathlib import Path

from harness import commands
from harness.stages import ROOT

SCRIPT = ROOT / "tools/local_slurm.sh"


def variables(folder):
    """Return what lets Slurm's commands find the cluster whose folder this is.

    The `python` of its jobs is this one.
    """
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {"SLURM_CONF": f"{folder}/slurm.conf", "PATH": path}


def script(what, code=None, **variables):
    """Call local_slurm.sh; return its Done, of any exit code unless one is given."""
    return commands.run(["bash", SCRIPT, what], code=code, **variables)


def show(job, **variables):
    """Return what Slurm says of a job, as a dict."""
    text = commands.run(["scontrol", "show", "job", job], **variables).stdout
    return dict(re.findall(r"(\w+)=(\S+)", text))
