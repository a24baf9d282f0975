"""What each rank of FSDP holds, with AdamW: a sheet to fill in before the first run.

python 12_fsdp/demos/memory_sheet.py
"""

# The shape of Llama 3 8B, of which a GPT as in common/gpt.py has 7.5 billion weights.
LARGE = {"vocabulary": 128_256, "context_length": 8192, "width": 4096, "depth": 32}


def sheet(
    ranks, tokens, vocabulary, context_length, width, depth, amp=False, ends_apart=False
):
    """Return the bytes of each part of a training step's memory, on each rank.

    tokens: of a rank's micro-batch; amp: autocast and MixedPrecisionPolicy in bfloat16;
    ends_apart: the embedding, and the last norm with the head, are groups of their own.
    """
    block = 12 * width**2 + 13 * width
    embedding, positions = vocabulary * width, context_length * width
    head = vocabulary * width + 2 * width  # with the last norm
    # fully_shard's groups in the order of the forward pass; the root stays whole
    root, groups = embedding + positions + head, [block] * depth
    whole_gradients = max(root, head + block)  # the head's wait for the embedding's
    if ends_apart:
        root, groups = positions, [embedding, *groups, head]
        whole_gradients = max(embedding + positions, block, head)
    weights = embedding + positions + depth * block + head

    # While a group's weights are copied out of the buffer in which they were gathered,
    # both are there, and so is the buffer of the group before.
    before, gathered = [root, *groups], 2 * root
    for previous, group in zip(before, groups, strict=False):
        gathered = max(gathered, root + previous + 2 * group)

    low = 2 if amp else 4  # bytes of a number in the passes; others are in float32
    return {
        "weights": 4 * weights // ranks,
        "gradients": 4 * weights // ranks,
        "AdamW": 8 * weights // ranks,
        "gathered": low * gathered,
        "whole gradients": low * whole_gradients,
        "copy to reduce": 4 * max(root, *groups),
        "activations": low * tokens * width * (16 * depth + 2),
        "logits": (low + 4) * tokens * vocabulary,  # and their log-softmax
    }


def main():
    print("8 ranks, 8192 tokens each, in GB       float32    bfloat16   and ends apart")
    columns = [{}, {"amp": True}, {"amp": True, "ends_apart": True}]
    sheets = [sheet(ranks=8, tokens=8192, **LARGE, **options) for options in columns]
    for name in sheets[0]:
        row = [one[name] / 1e9 for one in sheets]
        print("{:34}{:12.1f}{:12.1f}{:17.1f}".format(name, *row))
    totals = [sum(one.values()) / 1e9 for one in sheets]
    print("{:34}{:12.1f}{:12.1f}{:17.1f}".format("together, at most", *totals))


if __name__ == "__main__":
    main()
