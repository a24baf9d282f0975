"""your_own_script/memory.py: its sum is an upper bound, and close to what is counted.

Bytes of tensors are counted on two ranks of gloo, while a small Llama trains. What a
step sends is counted with them; one run was an H100's.
"""

import gc
import re
import shutil
import weakref

import peft
import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves
from torchao.optim import AdamW8bit
from transformers import AutoModelForCausalLM
from transformers import LlamaConfig
from transformers import Qwen3Config

from harness import commands
from harness.counting import Collectives
from harness.counting import Count
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
    "--groups blocks": 1.1,
    "--groups ddp": 1.1,
    "--activation-checkpointing": 1.1,
    "--grad-accum": 1.1,
    "--lora-rank 8": 1.1,
    "--lora-rank 8 --tokens 64": 1.33,
    "--tokens 64": 1.33,
    "--tokens 64 --groups blocks --precision float32": 1.33,
}


def config_of(flags, folder):
    """Write a configuration; return it, and memory.py's flags and Shape."""
    config = LlamaConfig(**SIZES)  # as many keys as queries: fewer are not repeated
    config.save_pretrained(folder)
    words = f"--gpus 2 --tokens 2048 --config {folder} {flags}"
    return config, *memory.parse_args(words.split())


class Held(Count):
    """Notes in `most` the most bytes of tensors that are alive after an operation."""

    def __init__(self, tensors):
        super().__init__()
        self.storages, self.most = {}, 0
        self.see(tensors)

    def see(self, tensors):
        for tensor in tensors:
            if type(tensor) in (torch.Tensor, nn.Parameter):
                storage = tensor.untyped_storage()
                self.storages[id(storage)] = weakref.ref(storage)

    def note(self, operation, args, result):
        if operation.namespace == "c10d":  # otherwise gloo's threads still have tensors
            for each in tree_leaves(result):
                if isinstance(each, torch.ScriptObject):
                    each.wait()
        self.see(tree_leaves((args, result)))
        alive = [storage() for storage in self.storages.values()]
        sizes = [storage.nbytes() for storage in alive if storage is not None]
        self.most = max(self.most, sum(sizes))


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
    if args.groups == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(model)
    else:
        mesh, bf16 = dist.init_device_mesh("cpu", (2,)), args.precision == "bf16"
        if args.groups == "blocks":  # as if nothing else had weights
            model.get_input_embeddings = model.get_output_embeddings = lambda: None
        base = model.get_base_model() if args.lora_rank else model
        sharded.shard_model(base, mesh, bf16)
    # foreach: the default on a GPU; on a CPU, AdamW updates one weight at a time
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, 1e-3, foreach=True)
    tokens = torch.randint(config.vocab_size, (args.tokens // 32, 32))

    def take_step():
        for last in (False, True)[not args.grad_accum :]:
            if args.grad_accum:
                model.set_requires_gradient_sync(last)
            with torch.autocast("cpu", low, enabled=low == torch.bfloat16):
                logits = wrapped(tokens, use_cache=False).logits
                loss = nn.functional.cross_entropy(logits.mT, tokens)
            loss.backward()
            del loss
        optimizer.step()

    take_step()  # its gradients stay
    if args.grad_accum:
        optimizer.zero_grad()
    gc.collect()
    states = [each for one in optimizer.state.values() for each in one.values()]
    kept = [*model.parameters(), *states, *[each.grad for each in trained]]
    kept = [getattr(each, "_local_tensor", each) for each in kept]
    with Held(kept) as held:
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


@pytest.mark.parametrize("flags", CASES)
def test_the_sum_is_an_upper_bound_and_close(flags, counted, tmp_path):
    """What is sent is exact; of two micro-batches, each gathers, and one reduces."""
    _, args, shape = config_of(flags, tmp_path)
    options, (most, sent) = memory.options_of(args), counted[flags]
    lines = memory.table(shape, **options)
    del lines["workspaces of cuBLAS"]
    assert most <= max(memory.together(lines)) <= CASES[flags] * most
    computed = memory.sent(shape, options)
    if args.grad_accum:
        computed += memory.sent(shape, options | {"grad_accum": False})
    assert computed == sent


def test_averages_in_8_bits(tmp_path):
    """What torchao makes of them; a vector's stay in float32."""
    config, args, shape = config_of("--optimizer adamw-8bit", tmp_path)
    optimizer, seen = AdamW8bit(nn.Linear(1, 1).parameters()), 0
    for weight in AutoModelForCausalLM.from_config(config).parameters():
        for signed in (True, False):
            made = optimizer._new_buffer(weight, signed)
            names = getattr(made, "tensor_attrs", None)
            parts = [getattr(made, name) for name in names] if names else [made]
            seen += sum(each.nbytes for each in parts)
    lines = memory.table(shape, **memory.options_of(args) | {"gpus": 1})
    assert seen <= lines["AdamW's averages, 8 bits"][0] <= 1.01 * seen


def test_a_llama_on_an_h100():
    """The run of your_own_script/hugging_face/README.md: 13.8 GiB."""
    shape = memory.Shape(16, 2048, 4, 2, 512, 4096, 32000)
    sums = memory.together(memory.table(shape, 1, 480, grad_accum=True))
    assert 13.8 <= max(sums) / 2**30 <= 1.02 * 13.8
    assert memory.MOMENTS[sums.index(max(sums))] == "optimizer"


def test_the_table_of_the_page():
    """Each row of docs/what_can_be_split.md, without and with the last flag."""
    page = (ROOT / "docs/what_can_be_split.md").read_text()
    rows = re.findall(r"^\| .* \| (none|`--.*`) \| (\S+) \| (\S+) \|$", page, re.M)
    assert len(rows) >= 4
    for flags, *shown in rows:
        for checkpointing, text in zip((False, True), shown, strict=True):
            args, shape = memory.parse_args(
                flags.replace("none", "").strip("`").split()
            )
            options = memory.options_of(args)
            options["activation_checkpointing"] = checkpointing
            sums = memory.together(memory.table(shape, **options))
            assert f"{max(sums) / 2**30:.1f}" == text


# ---- the command ---------------------------------------------------------------------
QWEN3 = Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=64)


@pytest.mark.parametrize(
    "config", [LlamaConfig(**SIZES), QWEN3], ids=["llama", "qwen3"]
)
def test_a_copy_of_the_file_prints_the_table(config, tmp_path):
    """Without this repository or any package."""
    program = shutil.copy(PROGRAM, tmp_path)
    config.save_pretrained(tmp_path)
    command = ["python", "-I", "-S", program, f"--config={tmp_path}"]
    first, header, *_, sums, last = commands.run(command).stdout.splitlines()
    number = AutoModelForCausalLM.from_config(config).num_parameters()
    assert first == f"{number:,} parameters; GiB on each GPU, at most:"
    most = max(map(float, sums.split()[1:]))
    assert header.split("  ")[-1].strip() == "optimizer"
    assert last == f"at most {most:.1f} GiB: loss"


def printed(words, capsys, monkeypatch):
    """Return the last line of what the program prints."""
    monkeypatch.setattr("sys.argv", ["memory.py", *words.split()])
    memory.main()
    return capsys.readouterr().out.splitlines()[-1]


def test_so_many_gpus_are_enough_and_one_less_is_not(capsys, monkeypatch):
    words = "--room 24 --activation-checkpointing --tokens 2048"
    last = printed(words, capsys, monkeypatch)
    gpus = int(last.removeprefix("so many GPUs of 24 GiB are enough: "))
    for number, fits in ((gpus, True), (gpus - 1, False)):
        args, shape = memory.parse_args([*words.split(), f"--gpus={number}"])
        lines = memory.table(shape, **memory.options_of(args))
        assert (max(memory.together(lines)) <= 0.95 * 24 * 2**30) == fits


WRONG = {
    "--gpus 0": "--gpus 0 has to be above 0",
    "--precision fp8": "--precision: invalid choice: 'fp8'",
    "--total-tokens 15e9": "--tokens-per-second and --total-tokens go together",
    "--config nonesuch": "--config: [Errno 2] No such file or directory",
}
CONFIGS = {
    '{"model_type": ': "Expecting",
    '{"model_type": "t5"}': "cannot count a 't5'; known are llama, mistral",
    '{"model_type": "llama"}': "num_hidden_layers is None, not an integer above 0",
}


@pytest.mark.parametrize("flags", [*WRONG, *CONFIGS])
def test_bad_input_gets_one_line(flags, tmp_path, capsys):
    said = WRONG.get(flags) or CONFIGS[flags]
    if flags in CONFIGS:
        (tmp_path / "config.json").write_text(flags)
        flags = f"--config {tmp_path}"
    with pytest.raises(SystemExit, match="^2$"):
        memory.parse_args(flags.split())
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert captured.out == "" and "error: " in line and said in line
