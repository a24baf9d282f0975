"""What happens to a model in one forward pass of nn.DataParallel, on a CPU.

python 02_dataparallel/demos/replicas.py

nn.DataParallel makes replicas on GPUs only. Here two replicas are made on the CPU, with
the method of nn.Module that torch calls for it (torch/nn/parallel/replicate.py).
"""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm = norm
        self.linear = nn.Linear(3, 1)
        self.batches_seen = 0

    def forward(self, x):
        self.batches_seen += 1
        return self.linear(self.norm(x))


def replicate(module, copy):
    """Return a replica of a module, with `copy(tensor)` for each of its tensors."""
    replica = module._replicate_for_data_parallel()
    for name, child in module.named_children():
        setattr(replica, name, replicate(child, copy))
    tensors = {**module._parameters, **module._buffers}
    for name, tensor in tensors.items():
        setattr(replica, name, copy(tensor))
    return replica


def data_parallel(model, batch):
    """Do what nn.DataParallel does in a forward pass on two GPUs."""
    on_gpu_0 = replicate(model, lambda tensor: tensor)  # shares the model's tensors
    on_gpu_1 = replicate(model, torch.clone)  # gradients flow back through the copy
    first, second = batch.chunk(2)
    return torch.cat([on_gpu_0(first), on_gpu_1(second)])


def main():
    torch.manual_seed(0)
    batch = torch.randn(8, 3, dtype=torch.float64)

    model = Net(nn.Identity()).double()
    data_parallel(model, batch).square().mean().backward()
    split = model.linear.weight.grad.clone()
    model.zero_grad()
    model(batch).square().mean().backward()
    assert (split - model.linear.weight.grad).abs().max() < 1e-10
    print("gradients: those of the whole batch")

    model = Net(nn.BatchNorm1d(3, momentum=1.0)).double()
    for _ in range(3):
        data_parallel(model, batch)
    print(f"batches seen, as the model counts them: {model.batches_seen}")
    mean = model.norm.running_mean
    assert torch.allclose(mean, batch[:4].mean(dim=0))
    assert not torch.allclose(mean, batch.mean(dim=0))
    print("batch norm's running mean: that of GPU 0's half of the batch")


if __name__ == "__main__":
    main()
