"""Train a small classifier on one GPU: python before.py"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data import TensorDataset


def make_dataset(size, seed):
    """Return random points, each labeled with the ring around the origin it is in."""
    points = torch.randn(size, 2, generator=torch.Generator().manual_seed(seed))
    labels = points.norm(dim=1).div(0.7).long().clamp(max=3)
    return TensorDataset(points, labels)


def train_one_epoch(model, loader, optimizer, device, noise):
    model.train()
    for points, labels in loader:
        points, labels = points.to(device), labels.to(device)
        points = points + noise * torch.randn_like(points)  # data augmentation
        loss = nn.functional.cross_entropy(model(points), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    loss_sum, correct, seen = 0.0, 0, 0
    for points, labels in loader:
        points, labels = points.to(device), labels.to(device)
        output = model(points)
        loss_sum += nn.functional.cross_entropy(output, labels, reduction="sum").item()
        correct += (output.argmax(dim=1) == labels).sum().item()
        seen += len(labels)
    return loss_sum / seen, correct / seen


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--noise", type=float, default=0.02)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    train_set, val_set = make_dataset(3007, seed=1), make_dataset(1001, seed=2)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True)
    val_loader = DataLoader(val_set, batch_size=args.batch_size)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.SiLU(), nn.Linear(64, 4)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    for epoch in range(1, args.epochs + 1):
        train_one_epoch(model, train_loader, optimizer, device, args.noise)
        loss, accuracy = evaluate(model, val_loader, device)
        print(f"epoch {epoch}: loss {loss:.4f}, accuracy {accuracy:.2%}")
    torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    main()
