"""Split a batch in front of layer norm and of batch norm; compare the gradients.

python 08_grad_accumulation/demos/norms.py
"""

import torch
from factors import by_size
from factors import gradient
from torch import nn

for name, norm in {"layer norm": nn.LayerNorm, "batch norm": nn.BatchNorm1d}.items():
    torch.manual_seed(0)
    layers = nn.Linear(10, 32), norm(32), nn.SiLU(), nn.Linear(32, 3)
    model = nn.Sequential(*layers).double()
    whole = gradient(model, 1, by_size)
    for n in (3, 5):  # these divide the 15 images
        off = (gradient(model, n, by_size) - whole).norm() / whole.norm()
        print(f"{name}, {n} micro-batches: off by {off:.0e}")
        assert (off < 1e-12) == (name == "layer norm")
