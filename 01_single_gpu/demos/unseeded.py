"""Train a small network twice without a seed, and twice with the seed 0.

python 01_single_gpu/demos/unseeded.py
"""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common import data

(images, labels), (val_images, _) = data.digits()


def train():
    """Return the first layer's weights, and the answers for the validation images."""
    train_set = TensorDataset(images.reshape(-1, 64) / 16, labels)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for inputs, targets in DataLoader(train_set, batch_size=48, shuffle=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return model[0].weight.detach(), model(val_images.reshape(-1, 64) / 16).argmax(1)


for name, set_seed in (
    ("without a seed", torch.seed),  # what a new process does
    ("with the seed 0", lambda: torch.manual_seed(0)),
):
    runs = []
    for _ in range(2):
        set_seed()
        runs.append(train())
    weights, answers = (torch.equal(*pair) for pair in zip(*runs, strict=True))
    print(f"{name:15}  the same weights: {weights}, the same answers: {answers}")
