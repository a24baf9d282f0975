"""A task with small gradients, in float16: with a loss scaler and without.

python 05_amp/demos/small_gradients.py

The loss is a mean over 2^20 outputs, as many as 16 images of 256 x 256 have pixels. The
gradient of one output is its error times 2 / 2^20, so it is zero in float16 for every
error below 1/64.
"""

import torch
from torch import nn

torch.manual_seed(0)
INPUTS = torch.randn(16 * 256 * 256, 2)
TARGETS = INPUTS @ torch.tensor([[0.05], [-0.03]])


def fit(scaler):
    """Return the losses, and the share of the last output's gradients that is zero."""
    model = nn.Linear(2, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    losses = []
    for _ in range(16):
        with torch.autocast("cpu", torch.float16):
            outputs = model(INPUTS)
            loss = nn.functional.mse_loss(outputs, TARGETS)
        outputs.retain_grad()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses, (outputs.grad == 0).double().mean().item()


for name, enabled in (("with a scaler", True), ("without", False)):
    losses, zero = fit(torch.amp.GradScaler("cpu", enabled=enabled))
    steps = " -> ".join(f"{losses[n]:.0e}" for n in (0, 5, 10, 15))
    print(f"{name:14}loss {steps}, {zero:.1%} of the gradients are zero")
    assert (losses[-1] < 1e-7) == enabled
