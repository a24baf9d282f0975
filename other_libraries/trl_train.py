"""Trains a model by its own completions (GRPO) with TRL, on two processes.

Each process generates with transformers, a reward function scores the completions, and
DDP averages the gradients. The model is small and random, and a completion is rewarded
for the share of its letters that are an "a". README.md says what else TRL
does.

$ .venv-trl/bin/python -m torch.distributed.run --standalone --nproc-per-node=2 \
    other_libraries/trl_train.py
{'loss': ... 'reward': ... 'epoch': '3.125'}
{'loss': ... 'reward': ... 'epoch': '6.25'}
{'train_runtime': ... 'epoch': '6.25'}
the reward has risen
both processes have the same weights
"""

import tempfile

import torch
import torch.distributed as dist
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import LlamaConfig
from transformers import LlamaForCausalLM
from transformers import PreTrainedTokenizerFast
from trl import GRPOConfig
from trl import GRPOTrainer


def make_tokenizer():
    """Return a tokenizer with a token per letter."""
    tokens = ["<pad>", "<end>", *"abcdefghijklmnopqrstuvwxyz"]
    numbers = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(WordLevel(numbers, unk_token="<pad>"))
    tokenizer.pre_tokenizer = Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>"
    )


def make_model(vocab_size):
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            vocab_size=vocab_size,
            pad_token_id=0,
            eos_token_id=1,
        )
    )


def share_of_a(completions, **_):
    """Return the reward of each of this process's completions, which are texts."""
    letters = [text.replace(" ", "") for text in completions]
    return [text.count("a") / max(len(text), 1) for text in letters]


def main():
    tokenizer = make_tokenizer()
    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            output_dir=folder,
            # Otherwise it does not find the other processes on a machine without a GPU.
            use_cpu=not torch.cuda.is_available(),
            bf16=False,
            num_generations=4,  # completions per prompt, which are compared
            per_device_train_batch_size=8,  # completions, so two prompts per process
            max_completion_length=8,
            max_steps=100,
            learning_rate=3e-3,
            logging_steps=50,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=make_model(len(tokenizer)),
            reward_funcs=share_of_a,
            args=settings,
            train_dataset=Dataset.from_dict({"prompt": ["count", "hello"] * 32}),
            processing_class=tokenizer,
        )
        trainer.train()
    first, last = (line["reward"] for line in trainer.state.log_history[:2])
    model = trainer.accelerator.unwrap_model(trainer.model)
    weights = torch.cat([weight.detach().flatten() for weight in model.parameters()])
    of_rank_0 = weights.clone()
    dist.broadcast(of_rank_0, src=0)
    equal = torch.tensor(torch.equal(weights, of_rank_0), dtype=torch.int)
    dist.all_reduce(equal, dist.ReduceOp.MIN)
    if dist.get_rank() == 0:
        assert last > first, f"rewards: {first}, {last}"
        print("the reward has risen")
        assert equal.item()
        print("both processes have the same weights")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
