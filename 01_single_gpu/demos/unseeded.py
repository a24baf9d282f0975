"""A small training run. Nothing in it is seeded, unless it is given a seed.

python 01_single_gpu/demos/unseeded.py FILE [SEED]
"""

import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data import TensorDataset

ROOT = Path(__file__).resolve().parents[2]


def main():
    if len(sys.argv) > 2:
        torch.manual_seed(int(sys.argv[2]))
    digits = np.load(ROOT / "common/digits.npz")
    images = torch.from_numpy(digits["images"]).float().reshape(-1, 64) / 16
    labels = torch.from_numpy(digits["labels"]).long()
    train_set = TensorDataset(images[:1440], labels[:1440])
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for inputs, targets in DataLoader(train_set, batch_size=48, shuffle=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    answers = model(images[1440:]).argmax(dim=1)
    accuracy = (answers == labels[1440:]).double().mean().item()
    print(f"validation accuracy: {accuracy:.2%}")
    torch.save({"weights": model[0].weight.detach(), "answers": answers}, sys.argv[1])


if __name__ == "__main__":
    main()
