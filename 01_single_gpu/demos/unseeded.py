"""A training run in which nothing is seeded: no two of them are alike.

python 01_single_gpu/demos/unseeded.py FILE
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
    digits = np.load(ROOT / "common/digits.npz")
    images = torch.from_numpy(digits["images"]).float().reshape(-1, 64) / 16
    labels = torch.from_numpy(digits["labels"]).long()
    train_set = TensorDataset(images[:1500], labels[:1500])
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for x, target in DataLoader(train_set, batch_size=60, shuffle=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), target).backward()
        optimizer.step()
    answers = model(images[1500:]).argmax(dim=1)
    accuracy = (answers == labels[1500:]).double().mean().item()
    print(f"validation accuracy: {accuracy:.2%}")
    torch.save({"weights": model[0].weight.detach(), "answers": answers}, sys.argv[1])


if __name__ == "__main__":
    main()
