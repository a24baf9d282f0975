"""Solutions of the exercises in pretrained_mistakes.ipynb."""

import torch
from torch.distributed.tensor import DTensor

# ---- exercise 1 ----------------------------------------------------------------------
# FSDP divides the sum of the ranks' gradients by their number, and nothing undoes it.
# So the gradient is an eighth of the right one, and seven eighths of it are missing.
gradient_off_by = 7 / 8
clips_from = 8.0


# ---- exercise 2 ----------------------------------------------------------------------
# Each position needs 10 bytes for each entry of the vocabulary. With the mistake, every
# GPU evaluates all 64 sequences, and otherwise the 8 of its micro-batch.
gib_of_the_global_batch = 64 * 1024 * 128256 * 10 / 2**30
gib_of_a_micro_batch = gib_of_the_global_batch / 8


# ---- exercise 3 ----------------------------------------------------------------------
def problems(model):
    found = []
    for name, weight in model.named_parameters():
        if weight.is_meta:
            found.append(f"{name} is on the meta device")
        if weight.requires_grad and not isinstance(weight, DTensor):
            found.append(f"{name} is trained and not sharded")
        if weight.requires_grad and weight.dtype != torch.float32:
            found.append(f"{name} is trained in {weight.dtype}")
    for name, buffer in model.named_buffers():
        if not buffer.isfinite().all():
            found.append(f"{name} is not finite")
        if buffer.is_floating_point() and not buffer.any():
            found.append(f"{name} is all zero")
    if not model.training:
        found.append("the model is in evaluation mode")
    return found
