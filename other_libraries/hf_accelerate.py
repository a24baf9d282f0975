"""Fine-tunes with Accelerate what your_own_script/hugging_face/fine_tune.py fine-tunes.

README.md shows which line of fine_tune.py became which, and what else
Accelerate does. On GPUs it shards the model with FSDP2; on CPUs it trains with DDP,
which shards nothing. The last line says how many modules were sharded.

$ python your_own_script/hugging_face/make_model.py llama --out runs/llama
$ torchrun --standalone --nproc-per-node=2 other_libraries/hf_accelerate.py \
    runs/llama --dtype=float64 --epochs=2 --out=runs/accelerate
epoch 1: loss 3.5938, norm of the last gradient 0.9767
epoch 2: loss 2.0125, norm of the last gradient 2.0253
modules sharded by FSDP2: 0
"""

import contextlib
import functools
import gc
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate import DataLoaderConfiguration
from accelerate import FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "your_own_script/hugging_face"))

from fine_tune import IGNORED
from fine_tune import collate
from fine_tune import count_labels
from fine_tune import make_dataset
from hf_args import parse_args


def get_loss_sums(model, inputs, labels):
    """Return the sum of the loss of each sequence, over the positions with a label."""
    logits = model(**inputs, use_cache=False).logits
    losses = nn.functional.cross_entropy(
        logits.transpose(1, 2), labels, reduction="none"
    )
    return losses.sum(1)


def train_one_epoch(accelerator, model, loader, optimizer):
    """Train on micro-batches; return the norm of the last gradient."""
    model.train()
    for batch in loader:  # already on the device
        tokens = accelerator.reduce(count_labels(batch))  # the sum of all processes
        optimizer.zero_grad()
        for number, (inputs, labels) in enumerate(batch, start=1):
            is_last = number == len(batch)
            with contextlib.nullcontext() if is_last else accelerator.no_sync(model):
                loss_sum = get_loss_sums(model, inputs, labels).sum()
                accelerator.backward(loss_sum * accelerator.num_processes / tokens)
        norm = accelerator.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


@torch.no_grad()
def evaluate(accelerator, model, loader):
    """Return the loss per token."""
    model.eval()
    loss_sum, tokens = 0.0, 0
    for ((inputs, labels),) in loader:
        sums = get_loss_sums(model, inputs, labels), (labels != IGNORED).sum(1)
        # Otherwise the sequences that a process repeats in its last batch count twice.
        loss_sums, counts = accelerator.gather_for_metrics(sums)
        loss_sum += loss_sums.sum().item()
        tokens += counts.sum().item()
    return loss_sum / tokens


def main():
    args = parse_args(__doc__)
    accelerator = Accelerator(
        # Otherwise each process trains alone on a machine without a GPU.
        cpu=not torch.cuda.is_available(),
        mixed_precision="bf16" if args.bf16 else "no",
        fsdp_plugin=FullyShardedDataParallelPlugin(
            fsdp_version=2,  # otherwise it is FSDP1
            # Otherwise the blocks are not sharded one by one.
            auto_wrap_policy="transformer_based_wrap",
        ),
        dataloader_config=DataLoaderConfiguration(
            split_batches=True,  # otherwise the batch size is that of one process
            # Only to compare with fine_tune.py: its order of the samples.
            use_seedable_sampler=True,
            data_seed=1,
        ),
    )
    train_set, val_set = make_dataset(505, seed=1), make_dataset(97, seed=2)
    train_loader = DataLoader(
        train_set,
        batch_size=args.batch_size,
        shuffle=True,
        drop_last=True,
        collate_fn=functools.partial(collate, micro_batches=args.micro_batches),
    )
    val_loader = DataLoader(val_set, batch_size=args.batch_size, collate_fn=collate)
    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=getattr(torch, args.dtype)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    model, optimizer, train_loader, val_loader = accelerator.prepare(
        model, optimizer, train_loader, val_loader
    )
    for epoch in range(1, args.epochs + 1):
        norm = train_one_epoch(accelerator, model, train_loader, optimizer)
        loss = evaluate(accelerator, model, val_loader)
        accelerator.print(f"epoch {epoch}: loss {loss:.4f}", end=", ")
        accelerator.print(f"norm of the last gradient {norm:.4f}")
    accelerator.unwrap_model(model).save_pretrained(
        args.out,
        is_main_process=accelerator.is_main_process,
        state_dict=accelerator.get_state_dict(model),
    )
    sharded = [part for part in model.modules() if isinstance(part, FSDPModule)]
    accelerator.print("modules sharded by FSDP2:", len(sharded))


if __name__ == "__main__":
    main()
    gc.collect()  # on gloo, a model still alive can abort the process at exit
    dist.destroy_process_group()
