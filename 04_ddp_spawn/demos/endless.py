"""Two processes that train until they are stopped, and note what stopped them.

python 04_ddp_spawn/demos/endless.py FOLDER
torchrun --standalone --nproc-per-node=2 04_ddp_spawn/demos/endless.py FOLDER

They end by themselves as soon as FOLDER/enough exists, or FOLDER no longer does.
"""

import os
import signal
import sys
import time
from pathlib import Path


def save_and_end(*_):
    """Be the handler of SIGTERM: a script would save a checkpoint here."""
    raise SystemExit(143)


def worker(rank, folder):
    signal.signal(signal.SIGTERM, save_and_end)
    end = "trained on"
    try:
        (folder / f"{rank}.pid").write_text(str(os.getpid()))
        while folder.exists() and not (folder / "enough").exists():
            time.sleep(0.05)
    except KeyboardInterrupt:
        end = "were interrupted"
        raise
    except SystemExit:
        end = "got SIGTERM and could save"
        raise
    finally:
        (folder / f"{rank}.end").write_text(end)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    if "RANK" in os.environ:  # started by torchrun
        worker(int(os.environ["RANK"]), folder)
    else:
        import torch.multiprocessing as mp

        mp.spawn(worker, (folder,), nprocs=2)
