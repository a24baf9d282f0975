"""Run asynchronous_saves.py, and kill the last rank while its thread saves.

torchrun --standalone --nproc-per-node=2 \
13_sharded_checkpoints/demos/killed_in_the_thread.py --checkpoint-dir checkpoints ...

Its thread waits with the third checkpoint until 15 steps have been taken.
"""

import os
import signal
import sys
import threading
from pathlib import Path

from torch.optim.optimizer import register_optimizer_step_post_hook

sys.path.insert(0, str(Path(__file__).resolve().parent))

from asynchronous_saves import PublishingWriter
from asynchronous_saves import main

taken = []
all_taken = threading.Event()


def count(*_):
    taken.append(1)
    if len(taken) == 15:
        all_taken.set()


class KilledWriter(PublishingWriter):
    saves = 0

    def write_data(self, plan, planner):
        KilledWriter.saves += 1
        last_rank = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
        if KilledWriter.saves == 3 and last_rank:
            all_taken.wait()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().write_data(plan, planner)


register_optimizer_step_post_hook(count)
main(KilledWriter)
