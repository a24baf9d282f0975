"""Solutions of the exercises in 05_amp.ipynb."""

import torch
from torch import nn

# ---- exercise 1 ----------------------------------------------------------------------
# Autocast converts what is in its lists: matrix products to bfloat16, losses to
# float32. All else computes in the types that it gets.
answers = {
    "x @ w": "bfloat16",
    "x + w": "float32",
    "x @ w + x": "float32",  # bfloat16 + float32
    "loss of x @ w": "float32",
}


# ---- exercise 2 ----------------------------------------------------------------------
# Autocast is around the network alone. Inside, also the product of two float32 tensors
# would be computed in bfloat16.
def contrastive_loss(network, images, texts):
    with torch.autocast(images.device.type, torch.bfloat16):
        first, second = network(images), network(texts)
    similarity = first.float() @ second.float().T / 0.07  # outside autocast
    return nn.functional.cross_entropy(similarity, torch.arange(len(images)))


# ---- fp16 exercise 1 -----------------------------------------------------------------
# Clipping saw gradients that were multiplied by the scale, so it made all of them too
# small. unscale_ divides them first, and step does not do it again.
bug = "    nn.utils.clip_grad_norm_("
repair = f"    scaler.unscale_(optimizer)\n{bug}"
