"""11_gpt: the model is GPT-2's formulas, and sees no byte after the one it predicts.

A run prints bits per byte and perplexity.
"""

import math
import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from common.gpt import GPT
from common.gpt import decay_groups
from common.gpt import describe_speed
from common.text import TextWindows
from harness.stages import ROOT
from harness.stages import first_with
from harness.stages import with_feature
from tests.conftest import only_in_release
from tests.training import run_stage
from tests.training import small_workload

TEXT = ROOT / "common/text.txt"


# ---- the data set --------------------------------------------------------------------
def numbers(n):
    """Return a text of which each byte says where it is; n is at most 256."""
    return torch.arange(n, dtype=torch.uint8)


@pytest.mark.parametrize("n, length, windows", [(9, 4, 2), (8, 4, 1), (5, 4, 1)])
def test_a_validation_set_is_cut_at_the_beginning(n, length, windows):
    val_set = TextWindows(numbers(n), length)
    assert len(val_set) == windows
    tokens, target = val_set.__getitems__(list(range(windows)))
    assert tokens.tolist() == [[*range(i, i + 4)] for i in range(0, 4 * windows, 4)]
    assert torch.equal(target, tokens + 1)
    assert tokens.dtype == target.dtype == torch.int64
    assert tokens.is_contiguous() and target.is_contiguous()
    one, following = val_set[windows - 1]
    assert torch.equal(one, tokens[-1]) and torch.equal(following, target[-1])
    val_set.epoch.fill_(3)
    assert torch.equal(val_set.__getitems__(list(range(windows)))[0], tokens)


@pytest.mark.parametrize("n, length", [(200, 7), (63, 8), (9, 1)])
def test_every_epoch_cuts_a_training_set_elsewhere(n, length):
    """No byte is twice in the inputs or in the targets of an epoch; few are in none."""
    train_set = TextWindows(numbers(n), length, recut=True, seed=5)
    firsts = []
    for epoch in range(length):
        train_set.epoch.fill_(epoch)
        tokens, target = train_set.__getitems__(list(range(len(train_set))))
        assert torch.equal(target, tokens + 1)
        seen = tokens.flatten().tolist()
        assert seen == list(range(seen[0], seen[0] + len(seen)))  # so none is twice
        assert n - len(seen) <= 2 * length
        firsts.append(seen[0])
    assert sorted(firsts) == list(range(length))
    train_set.epoch.fill_(length)
    assert train_set[0][0][0] == firsts[0]


# ---- the model -----------------------------------------------------------------------
@pytest.fixture
def model():
    torch.manual_seed(0)
    return GPT(256, 16, width=24, depth=3, heads=3).double()


def random_tokens(*shape):
    return torch.randint(256, shape, generator=torch.Generator().manual_seed(1))


def test_a_later_byte_does_not_change_earlier_logits(model):
    tokens = random_tokens(2, 16)
    before = model(tokens)
    for place in range(16):
        other = tokens.clone()
        other[:, place] = (other[:, place] + 1) % 256
        difference = (model(other) - before).abs().amax(dim=(0, 2))
        assert difference[:place].max().item() <= 1e-14 if place else True
        assert difference[place:].min() > 1e-8  # and all that come after it see it


def test_attention_is_the_formula(model):
    attention, x = model.blocks[0].attention, torch.randn(2, 5, 24).double()
    qkv = attention.qkv(x)
    heads = []
    for head in range(3):
        q, k, v = qkv[..., 24 * head : 24 * (head + 1)].split(8, dim=-1)
        scores = q @ k.transpose(1, 2) / math.sqrt(8)
        later = torch.ones(5, 5, dtype=torch.bool).triu(1)
        heads.append(scores.masked_fill(later, -math.inf).softmax(-1) @ v)
    assert torch.allclose(attention(x), attention.out(torch.cat(heads, -1)), atol=1e-14)


def test_initial_weights_are_those_of_gpt_2():
    torch.manual_seed(0)
    model = GPT(256, 64, width=64, depth=8, heads=4)
    for name, weight in model.named_parameters():
        if "norm" in name:
            assert (weight == (1 if name.endswith("weight") else 0)).all(), name
        elif name.endswith("bias"):
            assert (weight == 0).all(), name
        else:
            adds = name.endswith(("out.weight", "down.weight"))
            expected = 0.02 / 4 if adds else 0.02  # 4 is the root of 2 * 8
            assert weight.std().item() == pytest.approx(expected, rel=0.05), name
    tokens = random_tokens(4, 64)
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    assert loss.item() == pytest.approx(math.log(256), rel=0.02)


def test_matrices_decay_and_vectors_do_not(model):
    decaying, fixed = decay_groups(model, 0.1)
    assert (decaying["weight_decay"], fixed["weight_decay"]) == (0.1, 0.0)
    names = {each: name for name, each in model.named_parameters()}
    of_group = [{names[each] for each in g["params"]} for g in (decaying, fixed)]
    assert of_group[0] | of_group[1] == set(names.values())
    assert of_group[0].isdisjoint(of_group[1])
    assert all("bias" in name or "norm" in name for name in of_group[1])
    assert not any("bias" in name or "norm" in name for name in of_group[0])
    optimizer = torch.optim.AdamW(decay_groups(model, 0.1), lr=0.5)
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    for each in model.parameters():
        each.grad = torch.zeros_like(each)
    optimizer.step()
    for name, each in model.named_parameters():
        factor = 1 - 0.5 * 0.1 if name in of_group[0] else 1
        assert torch.allclose(each, before[name] * factor), name


# ---- the stage -----------------------------------------------------------------------
@pytest.mark.parametrize(
    "stage",
    [
        only_in_release(s, unless=s in (first_with("text"), first_with("shards")))
        for s in with_feature("text")
    ],
)
def test_a_run_prints_bits_and_perplexity_once(stage, several, device, tmp_path):
    last = tmp_path / "out/last.pt"
    flags = [*small_workload(stage, 300).flags, "--width", "32", "--heads", "2"]
    flags += ["--depth", "3", "--epochs", "2", "--device", device]
    run = [*flags, "--out-dir", last.parent]
    first, *others = run_stage(stage, several, run, tmp_path / "run").ranks
    assert not any(one.stdout for one in others)
    pattern = (
        r"epoch \d: train .*, val loss (\S+) .*\n"
        r"val (\S+) bits per byte, perplexity (\S+)\n"
    )
    epochs = re.findall(pattern, first.stdout)
    assert len(epochs) == 2
    for loss, bits, perplexity in epochs:
        assert float(bits) == pytest.approx(float(loss) / math.log(2), abs=2e-3)
        assert float(perplexity) == pytest.approx(math.exp(float(loss)), rel=2e-3)
    evaluation = run_stage(stage, 1, [*flags, "--evaluate", last], tmp_path / "again")
    assert evaluation.stdout.startswith(f"val loss {epochs[-1][0]} ")


# ---- the speed -----------------------------------------------------------------------
def test_mfu_is_of_a_known_gpu_and_of_the_work_of_this_process(monkeypatch):
    args = SimpleNamespace(width=1024, depth=16, context_length=1024, amp="bf16")
    args.device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    with torch.device("meta"):
        model = GPT(256, args.context_length, args.width, args.depth)
    layers = [each for each in model.modules() if isinstance(each, nn.Linear)]
    flops = 6 * sum(each.weight.numel() for each in layers)
    flops += 12 * args.depth * args.context_length * args.width
    shown = partial(describe_speed, args, 0.12 * 989e12 / flops)
    assert shown().endswith(" tokens/s per process, MFU 12%")
    args.tensor_parallel = 2
    assert shown().endswith("process, MFU 6%")
    args.amp = "off"
    assert shown().endswith("process")
    args.amp, args.device = "bf16", torch.device("cpu")
    assert shown().endswith("process")
