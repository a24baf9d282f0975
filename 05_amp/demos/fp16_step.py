"""A training step in float16, with a loss scaler: what changes in a loop of yours.

python 05_amp/demos/fp16_step.py
"""

import torch
from bf16_step import device
from bf16_step import train
from torch import nn


def step(model, optimizer, inputs, targets, scaler):
    optimizer.zero_grad()
    with torch.autocast(device, torch.float16):
        loss = nn.functional.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)  # only because the next line clips
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    return loss.detach()


if __name__ == "__main__":
    train(step, torch.amp.GradScaler(device))
