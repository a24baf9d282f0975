"""A text as a data set: its bytes are the tokens, and a sample is a window of them."""

import hashlib
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

from common.loader import shared_epoch


class TextWindows(Dataset):
    """A text, cut into windows; a language model predicts each window's next bytes.

    text: uint8 [N]; context_length: T, the length of a window; recut: cut every epoch
    at other places, as fits a training set. Then the first window begins at one of the
    first T bytes, at a different one in each of T epochs, so that a byte is not always
    predicted from the same part of what is before it. In an epoch, no byte is in the
    inputs twice, and none is a target twice. A rest that is too short is left out.

    `epoch` is a number in shared memory, so that DataLoader workers see it change:
    `text_set.epoch.fill_(epoch)`.
    """

    def __init__(self, text, context_length, recut=False, seed=0):
        self.text = text
        self.context_length = context_length
        self.epoch = shared_epoch()
        # NumPy does not change what this generator draws.
        offsets = np.random.RandomState(seed).permutation(context_length)
        self.offsets = offsets if recut else np.zeros(1, np.int64)

    def __len__(self):
        # As many in every epoch, wherever its first window begins.
        last = len(self.text) - 1 - int(self.offsets.max())
        return max(last, 0) // self.context_length

    def fingerprint(self):
        """Return a text that differs if a byte of the text does."""
        return hashlib.sha256(self.text.numpy()).hexdigest()

    def __getitem__(self, index):
        inputs, targets = self.__getitems__([index])
        return inputs[0], targets[0]

    def __getitems__(self, indices):
        """Return a batch: tokens, and the token after each, both int64 [B, T]."""
        indices = torch.as_tensor(indices, dtype=torch.int64)  # there can be none
        first = int(self.offsets[self.epoch.numpy() % len(self.offsets)])
        starts = first + indices * self.context_length
        positions = starts[:, None] + torch.arange(self.context_length + 1)
        windows = self.text[positions].long()
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def load(path, context_length, seed=0):
    """Return the training set, of nine tenths of a file, and the validation set.

    Any file will do: its bytes are the tokens. path: None for text.txt beside this
    module, which is taken from this tutorial. Raises OSError, and ValueError if a part
    is too short for a window.
    """
    path = path or Path(__file__).with_name("text.txt")
    text = torch.from_numpy(np.fromfile(path, np.uint8))
    end = len(text) * 9 // 10
    train_set = TextWindows(text[:end], context_length, recut=True, seed=seed)
    val_set = TextWindows(text[end:], context_length)
    if min(len(train_set), len(val_set)) == 0:
        raise ValueError(
            f"{path}: {len(text)} bytes are too few for windows of {context_length}"
        )
    return train_set, val_set
