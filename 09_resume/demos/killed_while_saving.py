"""Kill processes that do nothing but save, and count the files that can be read.

python 09_resume/demos/killed_while_saving.py FOLDER

Twenty processes use torch.save(state, path), and twenty common/weights.py.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common import weights

state = {"weights": torch.randn(2_000_000)}
for name, save in (("torch.save", torch.save), ("weights.save", weights.save)):
    readable = 0
    for number in range(20):
        path = f"{sys.argv[1]}/{name}-{number}.pt"
        save(state, path)
        child = os.fork()
        while child == 0:
            save(state, path)
        time.sleep(random.uniform(0.01, 0.05))
        os.kill(child, signal.SIGKILL)
        os.wait()
        try:
            weights.load(path)
            readable += 1
        except ValueError:
            pass
    print(f"{name}:", "all can be read" if readable == 20 else "some cannot be read")
