"""Clip the gradient after every micro-batch, instead of once per step.

python 08_grad_accumulation/demos/clipping.py
"""

import torch
from torch import nn

torch.manual_seed(0)
INPUTS, TARGETS = torch.randn(12, 10).double(), torch.arange(12) % 3
N, NORM = 4, 0.1
model = nn.Linear(10, 3).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def gradient(every_time, scaler):
    optimizer.zero_grad()
    parts = zip(INPUTS.chunk(N), TARGETS.chunk(N), strict=True)
    for micro_step, (some, labels) in enumerate(parts, start=1):
        loss = nn.functional.cross_entropy(model(some), labels) / N
        scaler.scale(loss).backward()
        if every_time or micro_step == N:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), NORM)
    return model.weight.grad.clone()


def main():
    off = torch.amp.GradScaler("cpu", enabled=False)  # as for float32 and bf16
    once, every_time = gradient(False, off), gradient(True, off)
    difference = (every_time - once).norm() / once.norm()
    print(f"without a scaler: off by {difference:.0e}")
    assert difference > 0.01

    print("with a scaler, as for fp16:", flush=True)
    gradient(True, torch.amp.GradScaler("cpu"))


if __name__ == "__main__":
    main()
