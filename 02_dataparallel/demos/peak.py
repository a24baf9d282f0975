"""Count the tensors of the logits' size that exist at once in one training step.

python 02_dataparallel/demos/peak.py
"""

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

TOKENS, VOCABULARY = 64, 1000


class CountLarge(TorchDispatchMode):
    """Print, for each operation that makes a large tensor, how many there are then."""

    large = 4 * TOKENS * VOCABULARY  # bytes

    def __init__(self):
        super().__init__()
        self.alive = set()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        outputs = result if isinstance(result, tuple) else (result,)
        large = [tensor for tensor in outputs if tensor.nbytes == self.large]
        new = {StorageWeakRef(t.untyped_storage()) for t in large} - self.alive
        self.alive = {ref for ref in self.alive | new if not ref.expired()}
        if new:
            print(f"{operation.name():32} {len(self.alive)}")
        return result


def main():
    hidden = torch.randn(TOKENS, 16)
    last_layer = nn.Linear(16, VOCABULARY, bias=False)
    targets = torch.zeros(TOKENS, dtype=torch.int64)
    with CountLarge():
        logits = last_layer(hidden)
        loss = nn.functional.cross_entropy(logits, targets)
        loss.backward()


if __name__ == "__main__":
    main()
