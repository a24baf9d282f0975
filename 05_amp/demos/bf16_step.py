"""A training step in bfloat16: what changes in a loop of yours.

python 05_amp/demos/bf16_step.py
"""

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"


def step(model, optimizer, inputs, targets):
    optimizer.zero_grad()
    with torch.autocast(device, torch.bfloat16):  # the only line that is new
        loss = nn.functional.cross_entropy(model(inputs), targets)
    loss.backward()
    optimizer.step()
    return loss.detach()


def train(step, *more):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.SiLU(), nn.Linear(64, 4)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    inputs = torch.randn(256, 8, device=device)
    targets = inputs[:, :4].argmax(1)  # the task: which of four numbers is largest?
    losses = [step(model, optimizer, inputs, targets, *more) for _ in range(100)]
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")


if __name__ == "__main__":
    train(step)
