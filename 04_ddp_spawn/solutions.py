"""Solutions of the exercises in 04_ddp_spawn.ipynb."""


# ---- exercise 1 ----------------------------------------------------------------------
def threads(cores, processes):
    return str(max(1, cores // processes))


# ---- exercise 2 ----------------------------------------------------------------------
def worker_file(folder):
    return f"""
from pathlib import Path

def work(rank):
    Path({folder!r}, str(rank)).touch()
"""
