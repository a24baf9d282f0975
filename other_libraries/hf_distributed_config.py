"""Fine-tunes what hugging_face/fine_tune.py does, sharded by transformers.

`from_pretrained(distributed_config=...)` loads the model and shards it with FSDP2, on
CPUs, too; from there on, everything is as in fine_tune.py. README.md shows
which line of it became which. The last line says how many modules were sharded.

$ python your_own_script/hugging_face/make_model.py llama --out runs/llama
$ torchrun --standalone --nproc-per-node=2 other_libraries/hf_distributed_config.py \
    runs/llama --dtype=float64 --epochs=2 --out=runs/distributed_config
epoch 1: loss 3.5938, norm of the last gradient 0.9767
epoch 2: loss 2.0125, norm of the last gradient 2.0253
modules sharded by FSDP2: 8
"""

import functools
import gc
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader
from torch.utils.data import DistributedSampler
from torch.utils.data import Subset
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "your_own_script/hugging_face"))

from fine_tune import collate
from fine_tune import evaluate
from fine_tune import make_dataset
from fine_tune import train_one_epoch
from hf_args import parse_args


def main():
    args = parse_args(__doc__, least_processes=2)  # it does not shard for one process
    model = AutoModelForCausalLM.from_pretrained(  # calls init_process_group, too
        args.model,
        dtype=getattr(torch, args.dtype),
        distributed_config=DistributedConfig(
            fsdp_size=args.processes, fsdp_mixed_precision=args.bf16
        ),
    )
    rank, device = dist.get_rank(), model.device
    train_set, val_set = make_dataset(505, seed=1), make_dataset(97, seed=2)
    sampler = DistributedSampler(train_set, drop_last=True)
    train_loader = DataLoader(
        train_set,
        batch_size=args.batch_size // args.processes,
        sampler=sampler,
        drop_last=True,
        collate_fn=functools.partial(collate, micro_batches=args.micro_batches),
    )
    val_set = Subset(val_set, range(rank, len(val_set), args.processes))
    val_loader = DataLoader(val_set, batch_size=args.batch_size, collate_fn=collate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    torch.manual_seed(rank)  # otherwise all ranks draw the same dropout
    for epoch in range(1, args.epochs + 1):
        sampler.set_epoch(epoch)
        norm = train_one_epoch(args, model, train_loader, optimizer, device)
        loss = evaluate(args, model, val_loader, device)
        if rank == 0:
            print(f"epoch {epoch}: loss {loss:.4f}", end=", ")
            print(f"norm of the last gradient {norm:.4f}")
    model.save_pretrained(args.out)  # on all ranks: it gathers the weights
    if rank == 0:
        sharded = [part for part in model.modules() if isinstance(part, FSDPModule)]
        print("modules sharded by FSDP2:", len(sharded))


if __name__ == "__main__":
    main()
    gc.collect()  # on gloo, a model still alive can abort the process at exit
    dist.destroy_process_group()
