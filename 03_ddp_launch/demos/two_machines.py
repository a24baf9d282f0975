"""Start two torchruns on this machine, each in a folder of its own, like two machines.

python 03_ddp_launch/demos/two_machines.py FOLDER SCRIPT [FLAGS]

Prints the command, what each of the two prints, in sorted order, and the files that
the script has left in each folder. Each torchrun has two processes.
"""

import os
import socket
import subprocess
import sys
from pathlib import Path

folder, script, *flags = sys.argv[1:]
options = "--nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d --rdzv-endpoint"
print(
    f"$ torchrun {options}=FIRST:29500 \\\n    {' '.join([script, *flags])}", flush=True
)

with socket.socket() as one:  # FIRST is this machine, and 29500 a port that is free
    one.bind(("127.0.0.1", 0))
    endpoint = "{}:{}".format(*one.getsockname())
torchrun = [sys.executable, "-m", "torch.distributed.run", *options.split()]
torchrun[-1] += f"={endpoint}"
running = {}
for machine in (1, 2):
    disk = Path(folder, f"machine_{machine}")
    disk.mkdir(parents=True)
    running[disk] = subprocess.Popen(
        [*torchrun, Path(script).resolve(), *flags],
        cwd=disk,
        # Two machines have two addresses. (A computer has many: 127.0.0.1 to ...254.)
        env={**os.environ, "PET_LOCAL_ADDR": f"127.0.0.{machine}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
outputs = {disk: one.communicate() for disk, one in running.items()}
for disk, (out, err) in outputs.items():
    if running[disk].returncode:
        sys.exit(err)
    for line in sorted(out.splitlines()):
        print(f"{disk.name} | {line}")
for disk in running:
    files = sorted(str(p.relative_to(disk)) for p in disk.rglob("*") if p.is_file())
    print(f"files of {disk.name}: {' '.join(files) or 'none'}")
