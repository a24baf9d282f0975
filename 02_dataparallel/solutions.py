"""Solutions of the exercises in 02_dataparallel.ipynb."""

from torch import nn


# ---- exercise 1 ----------------------------------------------------------------------
def without_prefix(state_dict):
    return {name.removeprefix("module."): tensor for name, tensor in state_dict.items()}


# ---- exercise 2 ----------------------------------------------------------------------
# torch.chunk makes parts of ceil(10 / 8) = 2 images, and after five there is none left.
images_per_gpu = [2, 2, 2, 2, 2]


# ---- exercise 3 ----------------------------------------------------------------------
class WithLoss(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, images, target):
        return nn.functional.cross_entropy(self.model(images), target, reduction="none")
