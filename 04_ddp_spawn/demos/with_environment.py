"""Spawn for_torchrun.py's main, one process for each set of environment variables.

python 04_ddp_spawn/demos/with_environment.py '[{"RANK": "0", ...}, {"RANK": "1", ...}]'
"""

import json
import os
import sys

import for_torchrun
import torch.multiprocessing as mp


def worker(index, environments):
    os.environ.update(environments[index])
    for_torchrun.main()


if __name__ == "__main__":
    environments = json.loads(sys.argv[1])
    mp.spawn(worker, (environments,), nprocs=len(environments))
