"""1F1B: each stage of a pipeline alternates a forward and a backward pass.

A stage first runs as many micro-batches forward as there are stages behind it: so long
it takes until the first gradient can come back. From then on each forward pass is
followed by a backward pass, whose activations are freed. So the first stage keeps as
many micro-batches as there are stages, and the last one keeps one, however many there
are in a batch.

Torch's Schedule1F1B, in torch.distributed.pipelining, does this, and its PipelineStage
finds out the shapes itself. Other schedules wait less.
"""

from collections import deque

import torch
import torch.distributed as dist


def train_step(part, inputs, targets, loss_fn, like):
    stage, stages, count = dist.get_rank(), dist.get_world_size(), len(inputs)
    kept = deque()  # of the micro-batches in flight: input and output

    def forward(x, number):
        x = inputs[number] if stage == 0 else x.requires_grad_()
        y = part(x)
        if stage == stages - 1:
            y = loss_fn(y, targets[number]) / count  # the gradients are summed
        kept.append((x, y))
        return y.detach()

    def backward(gradient):
        x, y = kept.popleft()
        y.backward(gradient)  # of a loss: None
        return x.grad

    ahead = min(stages - 1 - stage, count)
    order = "F" * ahead + "FB" * (count - ahead) + "B" * ahead
    before, came, numbers = "", None, iter(range(count))
    for now, then in zip(order, order[1:] + " ", strict=True):
        if now == "F":
            if before != "B":
                came = exchange(stage - 1, None, like)
            y = forward(came, next(numbers))
            came = exchange(stage + 1, y, like if then == "B" else None)
        else:
            if before == "B":
                came = exchange(stage + 1, None, like)
            gradient = backward(came)
            came = exchange(stage - 1, gradient, like if then == "F" else None)
        before = now


def exchange(neighbor, sent, like):
    """Send a tensor and receive one of the shape of `like`; each may be None.

    In one batch: when two stages send to each other, and each receives only after its
    send, both wait forever.
    """
    received = None if like is None else torch.empty_like(like)
    operations = []
    if sent is not None:
        operations.append(dist.P2POp(dist.isend, sent, neighbor))
    if received is not None:
        operations.append(dist.P2POp(dist.irecv, received, neighbor))
    if not operations or not 0 <= neighbor < dist.get_world_size():
        return None  # before the first stage and after the last one there is nobody
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received
