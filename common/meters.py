"""Accuracy, exact averages over many batches, and a progress line."""

import math
import sys
import time

import torch
from tqdm import tqdm

from common.loader import readable


def num_correct(outputs, targets, topk=(1,)):
    """Count the targets that are among the k largest logits.

    outputs: logits [B, classes]; targets: int64 [B], a class per image; topk: the
    values of k. With a token per position instead: [B, T, classes] and [B, T]. Returns
    an int64 tensor [len(topk)] on the same device. Does not wait for the device.
    """
    best = outputs.topk(min(max(topk), outputs.size(-1)), dim=-1).indices
    hits = best == targets[..., None]
    return torch.stack([hits[..., :k].sum() for k in topk])


class Meter:
    """Loss and accuracy over many batches: sums and counts, divided once at the end.

    `sums` is float64 [4] on the device: loss, correct@1, correct@5, and the count of
    targets, which is one per image, or one per token. It is a plain tensor, so the sums
    of several processes can be added. Updating it does not wait for the device.
    """

    def __init__(self, device):
        self.sums = torch.zeros(4, dtype=torch.float64, device=device)
        self.start = time.perf_counter()

    def update(self, loss, outputs, targets):
        """Add a batch: its mean loss, a scalar; its logits and targets, as above.

        An empty batch, whose mean loss is not a number, adds nothing.
        """
        if targets.numel() == 0:
            return
        self.sums[0] += loss.detach() * targets.numel()
        self.sums[1:3] += num_correct(outputs.detach(), targets, topk=(1, 5))
        self.sums[3] += targets.numel()

    def compute(self):
        """Return a dict: mean loss, acc@1 and acc@5 in percent, count, seconds."""
        loss, top1, top5, count = self.sums.tolist()  # waits for the device
        divisor = count or math.nan  # the average of no targets is not a number
        return {
            "loss": loss / divisor,
            "acc1": 100 * top1 / divisor,
            "acc5": 100 * top5 / divisor,
            "count": int(count),
            "seconds": time.perf_counter() - self.start,
        }


def format_metrics(metrics):
    """Return the metrics as text, without the seconds, so that runs can be compared."""
    if metrics["count"] == 0:
        return "(no samples)"
    return "loss {loss:.3f} acc@1 {acc1:.2f} acc@5 {acc5:.2f}".format(**metrics)


def progress(loader, title, meter, show=True, speed=None):
    """Yield the batches of `loader`, and show the progress on standard error.

    A terminal gets a bar; a log gets a line every ten seconds and one at the end. Both
    show `meter`'s metrics. Reading them waits for the device, so it happens at most
    twice a second. Nothing is shown if `show` is false.

    speed: a function; given the targets per second that `meter` has counted since the
    last line, it returns a text, which is shown, too.
    """
    terminal = sys.stderr.isatty()
    disable = not (show and terminal)
    bar = tqdm(readable(loader), title, len(loader), leave=False, disable=disable)
    last = shown = time.perf_counter()
    data_time = batch_time = 0.0
    counted = 0
    for count, batch in enumerate(bar, 1):
        data_time += time.perf_counter() - last
        yield batch
        now = time.perf_counter()
        batch_time += now - last
        last = now
        due = count == len(loader) or now - shown > (0.5 if terminal else 10)
        if show and due:
            data_ms, batch_ms = 1e3 * data_time / count, 1e3 * batch_time / count
            metrics = meter.compute()  # waits until the device has counted all of them
            text = f"data {data_ms:.1f} ms  batch {batch_ms:.1f} ms"
            text += f"  {format_metrics(metrics)}"
            rate = (metrics["count"] - counted) / (time.perf_counter() - shown)
            text += f"  {speed(rate)}" if speed else ""
            counted, shown = metrics["count"], time.perf_counter()
            if terminal:
                bar.set_postfix_str(text)
            else:
                line = f"{title} {count}/{len(loader)}  {text}"
                print(line, file=sys.stderr, flush=True)
            last = time.perf_counter()  # reading the metrics is no wait for data
            batch_time += last - now
