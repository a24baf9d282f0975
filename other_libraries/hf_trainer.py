"""Fine-tunes with the Trainer what hugging_face/fine_tune.py fine-tunes.

README.md shows which line of fine_tune.py became which, and what else the
Trainer does. On GPUs it shards the model with FSDP2; on CPUs it trains with DDP, which
shards nothing. The last line says how many modules were sharded.

$ python your_own_script/hugging_face/make_model.py llama --out runs/llama
$ torchrun --standalone --nproc-per-node=2 other_libraries/hf_trainer.py \
    runs/llama --dtype=float64 --epochs=2 --out=runs/trainer
{'loss': '4.639', 'grad_norm': '0.9776', 'learning_rate': '0.003', 'epoch': '1'}
{'eval_loss': '3.59', ... 'epoch': '1'}
{'loss': '2.781', 'grad_norm': '2.026', 'learning_rate': '0.003', 'epoch': '2'}
{'eval_loss': '2.012', ... 'epoch': '2'}
{... 'train_loss': '3.71', 'epoch': '2'}
modules sharded by FSDP2: 0
"""

import gc
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM
from transformers import Trainer
from transformers import TrainingArguments

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "your_own_script/hugging_face"))

from fine_tune import IGNORED
from fine_tune import make_dataset
from hf_args import parse_args


def collate(sequences):
    """Return what the model takes. The labels are not shifted: the model does that."""
    tokens = nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    labels = nn.utils.rnn.pad_sequence(sequences, True, IGNORED)
    mask = (labels != IGNORED).long()
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def main():
    args = parse_args(__doc__)
    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=getattr(torch, args.dtype)
    )
    local_batch_size = args.batch_size // args.processes
    training = TrainingArguments(
        fsdp=True,
        bf16=args.bf16,
        # Otherwise it does not find the other processes on a machine without a GPU.
        use_cpu=not torch.cuda.is_available(),
        num_train_epochs=args.epochs,
        per_device_train_batch_size=local_batch_size // args.micro_batches,
        gradient_accumulation_steps=args.micro_batches,
        per_device_eval_batch_size=local_batch_size,
        dataloader_drop_last=True,
        learning_rate=args.lr,
        lr_scheduler_type="constant",  # otherwise it falls to 0
        weight_decay=0.01,  # otherwise 0; this is the default of AdamW in torch
        data_seed=1,  # only to compare with fine_tune.py: its order of the samples
        logging_strategy="epoch",
        eval_strategy="epoch",
        save_strategy="no",
        disable_tqdm=True,
        output_dir=args.out,
    )
    trainer = Trainer(
        model,
        training,
        data_collator=collate,
        train_dataset=make_dataset(505, seed=1),
        eval_dataset=make_dataset(97, seed=2),
    )
    trainer.train()
    trainer.save_model()
    if trainer.is_world_process_zero():
        parts = trainer.model.modules()
        sharded = [part for part in parts if isinstance(part, FSDPModule)]
        print("modules sharded by FSDP2:", len(sharded))


if __name__ == "__main__":
    main()
    gc.collect()  # on gloo, a model still alive can abort the process at exit
    dist.destroy_process_group()
