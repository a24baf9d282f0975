"""Fine-tunes a Hugging Face model with the Trainer, on several processes.

README.md says what it does by default. On GPUs it shards the model with FSDP2; on CPUs
it trains with DDP, which shards nothing. The last line says how many modules were
sharded. Without MODEL, a folder or a name, it trains a small random Llama.

$ torchrun --standalone --nproc-per-node=2 other_libraries/hf_trainer.py --out=tuned
{'loss': '2.399', 'grad_norm': '0.7533', 'learning_rate': '0.003', 'epoch': '1'}
{'eval_loss': '0.8521', ... 'epoch': '1'}
{'loss': '0.3069', 'grad_norm': '0.09293', 'learning_rate': '0.003', 'epoch': '2'}
{'eval_loss': '0.06474', ... 'epoch': '2'}
{... 'train_loss': '1.353', 'epoch': '2'}
modules sharded by FSDP2: 0
"""

import argparse
import gc
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM
from transformers import LlamaConfig
from transformers import LlamaForCausalLM
from transformers import Trainer
from transformers import TrainingArguments

NO_LABEL = -100
GLOBAL_BATCH, MICRO_BATCHES, VOCABULARY = 24, 2, 64


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", help="a folder or a name")
    parser.add_argument("--out", type=Path, default=Path("tuned"))
    args = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        parser.error("run this program with torchrun --standalone --nproc-per-node=N")
    if GLOBAL_BATCH // MICRO_BATCHES % int(os.environ["WORLD_SIZE"]):
        parser.error(
            f"{GLOBAL_BATCH // MICRO_BATCHES} sequences must be divisible by N"
        )
    return args


def make_model(name):
    """Load a model, or make a small one, the same in all processes."""
    if name:
        return AutoModelForCausalLM.from_pretrained(name)
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128}
    layers = {"num_hidden_layers": 4, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, **layers))


def make_dataset(number, seed):
    """Return sequences of 8 to 24 tokens, each of which counts from somewhere."""
    torch.manual_seed(seed)
    lengths, first = torch.randint(8, 25, (number,)), torch.randint(64, (number,))
    pairs = zip(lengths, first, strict=True)
    return [(begin + torch.arange(length)) % VOCABULARY for length, begin in pairs]


def collate(sequences):
    """Return what the model takes. The labels are not shifted: the model does that."""
    tokens = nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    labels = nn.utils.rnn.pad_sequence(sequences, True, NO_LABEL)
    mask = (labels != NO_LABEL).long()
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def main():
    args = parse_args()
    local_batch_size = GLOBAL_BATCH // int(os.environ["WORLD_SIZE"])
    training = TrainingArguments(
        fsdp=True,
        # Otherwise it does not find the other processes on a machine without a GPU.
        use_cpu=not torch.cuda.is_available(),
        num_train_epochs=2,
        per_device_train_batch_size=local_batch_size // MICRO_BATCHES,
        gradient_accumulation_steps=MICRO_BATCHES,
        per_device_eval_batch_size=local_batch_size,
        dataloader_drop_last=True,
        learning_rate=3e-3,
        lr_scheduler_type="constant",  # otherwise it falls to 0
        weight_decay=0.01,  # otherwise 0; this is the default of AdamW in torch
        logging_strategy="epoch",
        eval_strategy="epoch",
        save_strategy="no",
        disable_tqdm=True,
        output_dir=args.out,
    )
    trainer = Trainer(
        make_model(args.model),
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
