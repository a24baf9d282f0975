"""Compare a loaded model with that of from_pretrained: python check_loading.py MODEL

It loads and evaluates as your fsdp.py does: copy it and sharded.py with this script.
One process holds the model twice, so take a small one, as make_model.py writes. The
exit code is 1 if something differs.
"""

import gc
import sys

import torch
from torch import distributed as dist

import fsdp
from sharded import ModelError
from sharded import make_plain


def find_differences(model, plain):
    """Yield a line for each way in which a sharded model differs from a plain one."""
    sharded = {name: weight.full_tensor() for name, weight in model.named_parameters()}
    sharded |= dict(model.named_buffers())
    kinds = {"weights": plain.named_parameters(), "buffers": plain.named_buffers()}
    for kind, tensors in kinds.items():
        names = [n for n, x in tensors if not sharded[n].equal(x.to(sharded[n].dtype))]
        if names:
            yield f"{kind} with other values: {list_names(names)}"
    for one, other, where in ((model, plain, "here"), (plain, model, "there")):
        other = dict(other.named_parameters())
        frozen = [name for name, w in one.named_parameters() if not w.requires_grad]
        frozen = [name for name in frozen if other[name].requires_grad]
        if frozen:
            yield f"frozen {where} only: {list_names(frozen)}"


def find_notes(config, plain):
    """Yield a line for each thing that trains differently; plain: after backward()."""
    trained = [(n, w) for n, w in plain.named_parameters() if w.requires_grad]
    unused = [name for name, weight in trained if weight.grad is None]
    if unused:
        yield f"without a gradient in this batch: {list_names(unused)}"
    for name, value in config.to_dict().items():
        if "layerdrop" in name and value:
            yield f"{name} is {value} in config.json: with FSDP2 no layer is dropped"


def list_names(names):
    return ", ".join(names[:3]) + f", and {len(names) - 3} more" * (len(names) > 3)


def main():
    args = fsdp.make_parser().parse_args()
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    device = torch.device("cpu")
    try:
        model = fsdp.load_model(args, device, dist.init_device_mesh("cpu", (1,)))
    except ModelError as error:
        sys.exit(str(error))
    plain_class = type(make_plain(model, model.dtype))
    plain = plain_class.from_pretrained(args.model, dtype=model.dtype)
    lines = list(find_differences(model, plain))
    inputs, labels = fsdp.collate(fsdp.make_dataset(4, seed=2))[0]
    losses = []
    for each in (model.eval(), plain.eval()):
        losses.append(fsdp.get_loss_sum(args, each, inputs, labels, device))
    losses[1].backward()
    ours, theirs = (loss.item() for loss in losses)
    if not abs(ours - theirs) <= 1e-5 * abs(theirs):  # nan, too
        lines.append(f"loss {ours:.4f}, with from_pretrained {theirs:.4f}")
    print(*lines or ["equal to the model of from_pretrained"], sep="\n")
    for line in find_notes(model.config, plain):
        print("note:", line)
    return 1 if lines else 0


if __name__ == "__main__":
    code = main()
    gc.collect()  # on gloo, a model still alive can abort the process at exit
    dist.destroy_process_group()
    sys.exit(code)
