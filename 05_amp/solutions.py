"""Solutions of the exercises in 05_amp.ipynb."""

from torch import nn


# ---- exercise 1 ----------------------------------------------------------------------
def smallest_scale(gradient):
    scale = 1
    while ((gradient * scale).half() == 0).sum() > (gradient == 0).sum():
        scale *= 2
    return scale


# ---- exercise 2 ----------------------------------------------------------------------
def step(loss, parameters, optimizer, scaler, clip):
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(parameters, clip)
    scaler.step(optimizer)
    scaler.update()
