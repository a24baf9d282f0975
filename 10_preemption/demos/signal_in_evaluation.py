"""Run a script, and in its first evaluation send SIGTERM to rank 0.

torchrun --standalone --nproc-per-node=2 10_preemption/demos/signal_in_evaluation.py \
10_preemption/train.py --device cpu --epochs 2
"""

import os
import runpy
import signal
import sys

from torch.nn.modules.module import register_module_forward_pre_hook

sent = []


def before_forward(module, _):
    if os.environ["RANK"] == "0" and not module.training and not sent:
        sent.append(1)
        os.kill(os.getpid(), signal.SIGTERM)


register_module_forward_pre_hook(before_forward)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
