"""Rendezvous at a port that another program holds, then in a file.

python 04_ddp_spawn/demos/taken_port.py
"""

import socket
from tempfile import TemporaryDirectory

import torch.distributed as dist

with socket.create_server(("127.0.0.1", 0)) as another_program:
    port = another_program.getsockname()[1]
    address = f"tcp://127.0.0.1:{port}"
    try:
        dist.init_process_group("gloo", init_method=address, rank=0, world_size=1)
    except dist.DistNetworkError as error:
        print("port:", str(error).replace(str(port), "PORT"))
    with TemporaryDirectory() as folder:
        address = f"file://{folder}/rendezvous"
        dist.init_process_group("gloo", init_method=address, rank=0, world_size=1)
        print("file: joined, world size", dist.get_world_size())
        dist.destroy_process_group()
