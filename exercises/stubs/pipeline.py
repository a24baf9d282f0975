"""Write the 1F1B schedule of a pipeline: rank r is stage r, with its part of a model.

With 3 stages and 5 micro-batches, F0 is the forward pass of micro-batch 0, B0 its
backward pass:

    stage 0   F0 F1 F2 B0 F3 B1 F4 B2 B3 B4
    stage 1   F0 F1 B0 F2 B1 F3 B2 F4 B3 B4
    stage 2   F0 B0 F1 B1 F2 B2 F3 B3 F4 B4

What is counted: the order of the passes, and how many outputs a stage keeps: at most
one for each stage from this one to the last. Only neighbors exchange something, and
nothing is sent twice.

On nccl, what two ranks exchange runs in the order of the calls. So two stages that both
send first wait for each other forever. The operations of one dist.batch_isend_irecv run
together. The check uses gloo, and finds out what nccl would do.
"""


def train_step(part, inputs, targets, loss_fn, like):
    """Run all micro-batches forward and backward, and leave the gradients in .grad.

    part: this stage's nn.Module; the first one gets a micro-batch of the inputs, every
        other what the part before it returned, and the last one's output goes to the
        loss function
    inputs, targets: lists of tensors, one for each micro-batch; on all stages, and used
        on the first and on the last one only
    loss_fn: loss_fn(output, target) is the mean over a micro-batch; the gradients are
        those of the mean over all micro-batches
    like: a tensor with the shape and dtype of what a part hands to the next one

    There may be fewer micro-batches than stages.
    """
    raise NotImplementedError
