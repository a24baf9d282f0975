"""What the forward passes of nn.DataParallel leave in a model, and what they do not.

python 02_dataparallel/demos/lost.py
"""

import torch
from replicas import data_parallel
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3, momentum=1.0)  # 1.0: the last batch's mean alone
        self.linear = nn.Linear(3, 1)
        self.batches_seen = 0
        self.register_buffer("in_a_buffer", torch.tensor(0))

    def forward(self, inputs):
        self.batches_seen += 1
        self.in_a_buffer += 1
        return self.linear(self.norm(inputs))


torch.manual_seed(0)
inputs, model = torch.randn(8, 3), Net()
for _ in range(3):
    data_parallel(model, inputs, gpus=2)
print(f"batches seen: {model.batches_seen}; in a buffer: {model.in_a_buffer}")
print("batch norm's running mean is the mean of ...")
for images, name in ((inputs, "the whole batch"), (inputs[:4], "GPU 0's half")):
    same = torch.allclose(model.norm.running_mean, images.mean(dim=0))
    print(f"    {name}: {same}")
