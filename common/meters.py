"""Accuracy, averages that are exact, and the line that shows how a run is going."""

import math
import sys
import time

import torch
from tqdm import tqdm


def num_correct(output, target, topk=(1,)):
    """Count the images whose class is among the k largest logits.

    output: logits [B, classes]; target: int64 [B]; topk: the values of k.
    Returns an int64 tensor [len(topk)] on the same device; it costs no synchronisation.
    """
    best = output.topk(min(max(topk), output.size(1)), dim=1).indices
    hits = best == target[:, None]
    return torch.stack([hits[:, :k].sum() for k in topk])


def accuracy(output, target, topk=(1,)):
    """Return the accuracy of one batch in per cent, float32 [len(topk)]. Shapes as in `num_correct`.

    For a single batch. Over several batches add up what `num_correct` counts, and divide once.
    """
    return num_correct(output, target, topk) * 100.0 / len(target)


class Meter:
    """Loss and accuracy over many batches: sums and counts, divided once at the end.

    `sums` is float64 [4] on the device: loss, correct@1, correct@5, images. It is a plain tensor,
    so the sums of several processes can be added. Adding to it does not wait for the device.
    """

    def __init__(self, device):
        self.sums = torch.zeros(4, dtype=torch.float64, device=device)
        self.start = time.perf_counter()

    def update(self, loss, output, target):
        """Add a batch: its mean loss (a scalar), its logits [B, classes] and target [B]."""
        self.sums[0] += loss.detach() * len(target)
        self.sums[1:3] += num_correct(output.detach(), target, topk=(1, 5))
        self.sums[3] += len(target)

    def compute(self):
        """Return the mean loss, acc@1 and acc@5 in per cent, the images and the seconds it took."""
        loss, top1, top5, images = self.sums.tolist()  # waits for the device
        seen = images or math.nan  # of no images there is no average
        return {
            "loss": loss / seen,
            "acc1": 100 * top1 / seen,
            "acc5": 100 * top5 / seen,
            "images": int(images),
            "seconds": time.perf_counter() - self.start,
        }


def format_metrics(metrics):
    """Return the averages of a Meter as text; without the seconds, so that runs can be compared."""
    return f"loss {averages['loss']:.3f} acc@1 {averages['acc1']:.2f} acc@5 {averages['acc5']:.2f}"


def progress(loader, title, meter, show=True):
    """Yield the batches of `loader`, and show on standard error how it is going.

    A person at a terminal gets a bar, a log gets a line every ten seconds and one at the end. The
    figures are those of `meter`; reading them waits for the device, so that is done twice a second
    at most. Where `show` is false nothing is shown.
    """
    watched = sys.stderr.isatty()
    bar = tqdm(loader, title, leave=False, disable=not (show and watched))
    last = shown = time.perf_counter()
    data_time = batch_time = 0.0
    for number, batch in enumerate(bar, 1):
        data_time += time.perf_counter() - last
        yield batch
        now = time.perf_counter()
        batch_time += now - last
        last = now
        due = number == len(loader) or now - shown > (0.5 if watched else 10)
        if show and due:
            shown = now
            data_ms, batch_ms = 1e3 * data_time / number, 1e3 * batch_time / number
            text = f"data {data_ms:.1f} ms  batch {batch_ms:.1f} ms  {format_metrics(meter.compute())}"
            if watched:
                bar.set_postfix_str(text)
            else:
                print(f"{title} {number}/{len(loader)}  {text}", file=sys.stderr, flush=True)
