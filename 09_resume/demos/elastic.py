"""A run on two machines, then on one, and on two again.

python 09_resume/demos/elastic.py FOLDER

Two launchers on this machine stand for the machines A and B; A's has the launchers'
store. In step 12 machine B is killed, its launcher and its rank. When A has taken step
32 alone, B is started again. FOLDER gets the checkpoints and the weights.
"""

import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

SCRIPT = "09_resume/train.py"
# By default a machine may be silent for three times 5 s, and the others wait 30 s for
# more machines. Here it is three times 2 s, and 10 s.
COMMAND = f"""\
torchrun --nnodes=1:2 --nproc-per-node=1 --max-restarts=1 \\
  --rdzv-id=elastic --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:PORT \\
  --rdzv-conf=keep_alive_interval=2,last_call_timeout=10 --local-addr=127.0.0.1 \\
  {SCRIPT} --device cpu --epochs 2 --dtype float64 \\
  --checkpoint-every 5 --checkpoint-dir FOLDER/checkpoints --out-dir FOLDER/out"""


def start(port, folder, has_store, **variables):
    """Start a machine's launcher; its rank runs this file instead of the script."""
    command = COMMAND.replace("PORT", str(port)).replace("FOLDER", str(folder))
    command = command.replace(SCRIPT, f"{__file__} {folder}")
    # Both are on the endpoint's machine, so say which of them has the store.
    is_host = f"--rdzv-conf=is_host={int(has_store)},"
    command = command.replace("--rdzv-conf=", is_host).replace("\\\n", "")
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *command.split()[1:]],
        env={**os.environ, **variables},
    )


def train(folder):
    """Run the script in this rank, and make happen what the docstring says."""
    steps = []

    def after_step(*_):
        steps.append(1)
        if "DIES" in os.environ and len(steps) == 12:
            os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        if dist.get_world_size() == 1 and len(steps) == 22:
            (folder / "trained alone").touch()
            time.sleep(600)  # until its launcher ends this rank

    register_optimizer_step_post_hook(after_step)
    runpy.run_path(SCRIPT, run_name="__main__")


def main(folder):
    folder.mkdir(parents=True, exist_ok=True)
    print(f"on A and on B:\n$ {COMMAND}", flush=True)
    # a free port, at which A's launcher makes the store
    port = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False).port
    a = start(port, folder, has_store=True)
    b = start(port, folder, has_store=False, DIES="1")
    print(f"B: killed by signal {-b.wait()}", flush=True)
    while a.poll() is None and not (folder / "trained alone").exists():
        time.sleep(0.1)
    if a.poll() is None:
        print("B: started again, with the same command", flush=True)
        b = start(port, folder, has_store=False)
    sys.exit(max(a.wait(), b.wait()))


if __name__ == "__main__":
    if "RANK" in os.environ:
        folder = Path(sys.argv.pop(1))
        sys.argv[0] = SCRIPT
        train(folder)
    else:
        main(Path(sys.argv[1]))
