"""Three ways in which a process group does not come up, each given up after a second.

python 06_slurm/demos/no_start.py
"""

from datetime import timedelta

import torch.distributed as dist

PORT = 29871

for what, address, rank in (
    ("rank 1, nobody listens at the address", "127.0.0.1", 1),
    ("rank 1, a name that does not resolve", "node1.invalid", 1),
    ("rank 0, rank 1 was never started", "127.0.0.1", 0),
):
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{address}:{PORT}",
            rank=rank,
            world_size=2,
            timeout=timedelta(seconds=1),
        )
    except dist.DistError as error:
        print(f"{what}:\n    {type(error).__name__}: {error}")
