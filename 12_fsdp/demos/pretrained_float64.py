"""Run a script in which the norm of a Llama computes in the dtype of its input.

torchrun --standalone --nproc-per-node=2 \
    12_fsdp/demos/pretrained_float64.py \
    your_own_script/hugging_face/fsdp.py FOLDER --dtype float64

transformers computes it in float32, whatever the dtype of the model.
"""

import runpy
import sys
from pathlib import Path

from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm


def forward(self, x):
    return nn.functional.rms_norm(x, x.shape[-1:], self.weight, self.variance_epsilon)


LlamaRMSNorm.forward = forward
sys.argv = sys.argv[1:]
sys.path[0] = str(Path(sys.argv[0]).parent)  # where the script finds sharded.py
runpy.run_path(sys.argv[0], run_name="__main__")
