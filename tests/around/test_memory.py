"""your_own_script/memory.py: its sum is an upper bound, and close to what is counted.

Bytes of tensors are counted on two ranks of gloo, while a small Llama trains. What a
step sends is counted with them; one run was an H100's.
"""

import gc
import shutil

import peft
import pytest
import torch
from torch import distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM
from transformers import LlamaConfig

from harness import commands
from harness.counting import Collectives
from harness.counting import Memory
from harness.stages import ROOT
from tests import fsdp_ranks
from tests.training import TRANSFORMERS
from tests.training import load_program

pytestmark = pytest.mark.ci

commands.preloaded += TRANSFORMERS

PROGRAM = ROOT / "your_own_script/memory.py"
memory = load_program(PROGRAM, "memory_calculator")
sharded = load_program(PROGRAM.parent / "hugging_face/sharded.py", "sharded")
SIZES = {"vocab_size": 4096, "hidden_size": 192, "intermediate_size": 384}
SIZES |= {"num_hidden_layers": 4, "num_attention_heads": 4}

# {flags: how many times the counted bytes the sum may be}. With few tokens, the fullest
# moment is not when the loss is differentiated, and lines are not full at once.
CASES = {
    "": 1.1,
    "--precision float32": 1.1,
    "--ddp": 1.1,
    "--activation-checkpointing": 1.1,
    "--lora-rank 8": 1.1,
    "--tokens 64": 1.33,
}


def config_of(flags, folder):
    """Write a configuration; return it, and memory.py's flags and Shape."""
    config = LlamaConfig(**SIZES)  # as many keys as queries: fewer are not repeated
    config.save_pretrained(folder)
    words = f"--gpus 2 --tokens 2048 --config {folder} {flags}"
    return config, *memory.parse_args(words.split())


def train(flags, folder):
    """Take three steps; return the most bytes in the second, what the third sends."""
    torch.manual_seed(0)
    config, args, _ = config_of(flags, folder)
    low = torch.bfloat16 if args.precision == "bf16" else torch.float32
    dtype = low if args.lora_rank else torch.float32
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).train()
    if args.lora_rank:
        adapters = peft.LoraConfig(r=args.lora_rank, target_modules="all-linear")
        model = peft.get_peft_model(model, adapters)
    if args.activation_checkpointing:
        model.activation_checkpointing_enable()
    wrapped = model
    if args.ddp:
        wrapped = nn.parallel.DistributedDataParallel(model)
    else:
        mesh, bf16 = dist.init_device_mesh("cpu", (2,)), args.precision == "bf16"
        base = model.get_base_model() if args.lora_rank else model
        sharded.shard_model(base, mesh, bf16)
    # foreach: the default on a GPU; on a CPU, AdamW updates one weight at a time
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, 1e-3, foreach=True)
    tokens = torch.randint(config.vocab_size, (args.tokens // 32, 32))

    def take_step():
        with torch.autocast("cpu", low, enabled=low == torch.bfloat16):
            logits = wrapped(tokens, use_cache=False).logits
            loss = nn.functional.cross_entropy(logits.mT, tokens)
        loss.backward()
        del loss
        optimizer.step()

    take_step()  # its gradients stay
    gc.collect()
    states = [each for one in optimizer.state.values() for each in one.values()]
    grads = [each.grad for each in trained]
    with Memory([*model.parameters(), *states, *grads]) as held:
        take_step()
    with Collectives() as collectives:
        take_step()
    around = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}  # of a ring
    sent = sum(around.get(name, 0) * whole for name, *_, whole in collectives.seen)
    return held.most, sent // 2


def train_all(_rank, _processes, folder):
    """Return what is counted in each case."""
    return [train(flags, folder) for flags in CASES]


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    """Return {flags: what rank 0 counts}."""
    folder = tmp_path_factory.mktemp("counted")
    calls = [(train_all, rank, 2, folder, folder / str(rank)) for rank in range(2)]
    commands.call_in_forks(fsdp_ranks.in_group, calls)
    return dict(zip(CASES, torch.load(folder / "0.pt"), strict=True))


@pytest.mark.release
@pytest.mark.parametrize("flags", CASES)
def test_the_sum_is_an_upper_bound_and_close(flags, counted, tmp_path):
    """What is sent is exact."""
    _, args, shape = config_of(flags, tmp_path)
    options, (most, sent) = memory.options_of(args), counted[flags]
    lines = memory.table(shape, **options)
    del lines["workspaces of cuBLAS"]
    assert most <= max(memory.together(lines)) <= CASES[flags] * most
    assert memory.sent(shape, options) == sent


def test_a_llama_on_an_h100():
    """The run of your_own_script/hugging_face/README.md: 13.8 GiB."""
    shape = memory.Shape(16, 2048, 4, 2, 512, 4096, 32000)
    sums = memory.together(memory.table(shape, 1, 480, grad_accum=True))
    assert 13.8 <= max(sums) / 2**30 <= 1.02 * 13.8
    assert memory.MOMENTS[sums.index(max(sums))] == "optimizer"


# ---- the command ---------------------------------------------------------------------
def test_a_copy_of_the_file_prints_the_table(tmp_path):
    """Without this repository or any package."""
    program, config = shutil.copy(PROGRAM, tmp_path), LlamaConfig(**SIZES)
    config.save_pretrained(tmp_path)
    command = ["python", "-I", "-S", program, f"--config={tmp_path}"]
    first, *_, sums, last = commands.run(command).stdout.splitlines()
    number = AutoModelForCausalLM.from_config(config).num_parameters()
    assert first == f"{number:,} parameters; GiB on each GPU, at most:"
    most = max(map(float, sums.split()[1:]))
    assert last == f"at most {most:.1f} GiB: loss"


WRONG = {
    "--gpus 0": "--gpus 0 has to be above 0",
    "--total-tokens 15e9": "--tokens-per-second and --total-tokens go together",
    "--config nonesuch": "--config: [Errno 2] No such file or directory",
    '{"model_type": "t5"}': "cannot count a 't5'; known are llama, mistral",
}


@pytest.mark.parametrize("flags", WRONG)
def test_bad_input_gets_one_line(flags, tmp_path, capsys):
    said = WRONG[flags]
    if flags.startswith("{"):
        (tmp_path / "config.json").write_text(flags)
        flags = f"--config {tmp_path}"
    with pytest.raises(SystemExit, match="^2$"):
        memory.parse_args(flags.split())
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert captured.out == "" and "error: " in line and said in line
