"""Print which share of a model's weights five small updates change, by their dtype.

torchrun --standalone --nproc-per-node=2 12_fsdp/demos/small_updates.py FOLDER
"""

import argparse
import gc
import sys
import types
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT), str(ROOT / "your_own_script/hugging_face")]

import fine_tune

CPU = torch.device("cpu")
CASES = (("float32", False), ("bfloat16", False), ("bfloat16", True))


def load(folder, dtype, policy):
    """Return the sharded model of a folder, loaded as fine_tune.py does."""
    args = types.SimpleNamespace(model=folder, dtype=dtype, bf16=policy)
    args.lora_rank = args.rank_0_reads = 0
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    return fine_tune.load_model(args, CPU, mesh)


def main(folder):
    """Print the share of the weights that change in five steps of AdamW."""
    log = print if dist.get_rank() == 0 else lambda *_: None
    log("learning rate   float32  bfloat16  bfloat16 with the policy")
    for lr in (1e-6, 1e-5, 1e-4, 1e-3):
        shares = []
        for dtype, policy in CASES:
            model = load(folder, dtype, policy)
            before = [weight.to_local().clone() for weight in model.parameters()]
            train(model, policy, lr)
            shares.append(share_changed(before, model))
        log("{:13.0e}{:10.1%}{:10.1%}{:12.1%}".format(lr, *shares))


def train(model, policy, lr):
    """Take five optimizer steps, of eight sequences each."""
    args = types.SimpleNamespace(bf16=policy)
    mine = fine_tune.make_dataset(40, seed=1)[dist.get_rank() :: dist.get_world_size()]
    size = 8 // dist.get_world_size()
    loader = DataLoader(mine, batch_size=size, collate_fn=fine_tune.collate)
    # Otherwise weights change that have no gradient.
    optimizer = torch.optim.AdamW(model.parameters(), lr, weight_decay=0)
    fine_tune.train_one_epoch(args, model, loader, optimizer, CPU)


def share_changed(before, model):
    """Return the share of the weights, on all ranks, that differ from `before`."""
    after = [weight.to_local() for weight in model.parameters()]
    changed = sum((a != b).sum() for a, b in zip(after, before, strict=True))
    counts = torch.tensor([changed, sum(each.numel() for each in before)])
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="config.json and *.safetensors")
    args = parser.parse_args()
    if not list(args.folder.glob("*.safetensors")):
        parser.error(f"there is no *.safetensors in {args.folder}")
    dist.init_process_group("gloo")
    main(args.folder)
    gc.collect()
    dist.destroy_process_group()
