"""your_own_script/check_yours.py names what is wrong, and accepts what is right."""

import json
import math
import os
import re
import shutil
import signal
import tempfile
import types

import pytest
import torch
from torch import nn

from harness import commands
from harness.stages import ROOT
from tests.conftest import only_in_release
from tests.training import load_program
from tests.training import replace_once

pytestmark = pytest.mark.ci

FOLDER = ROOT / "your_own_script"
CHECK, AFTER = FOLDER / "check_yours.py", FOLDER / "after.py"
PAGE = (FOLDER / "README.md").read_text()
(COMMAND,) = re.findall(r"^\$ (python check_yours\.py .*)$", PAGE, re.MULTILINE)
# A smaller task: two epochs of eight steps.
SMALL = [
    ("make_dataset(3007, seed=1)", "make_dataset(199, seed=1)"),
    ("make_dataset(1001, seed=2)", "make_dataset(53, seed=2)"),
    ('"--epochs", type=int, default=5', '"--epochs", type=int, default=2'),
    ('"--batch-size", type=int, default=64', '"--batch-size", type=int, default=24'),
    ('"--noise", type=float, default=0.02', '"--noise", type=float, default=0.0'),
]


def check(folder, *changes, options="--processes=1,2", flags="", code=0):
    """Run the check, in a fork, on after.py with changes; return what it printed."""
    replace_once(AFTER, *SMALL, target=folder / "after.py")
    replace_once(folder / "after.py", *changes)
    words = *options.split(), "after.py", *flags.split()
    return run(folder, *words, code=code).stdout


def run(folder, *words, code=0):
    """Run the check, in a fork, in a folder; return a Done."""
    words = ["python", CHECK, *words]
    return commands.run(words, folder / "out", forks=True, cwd=folder, code=code)


# ---- what is wrong -------------------------------------------------------------------
SAMPLER = "DistributedSampler(train_set, drop_last=True)"
LOADER = "sampler=sampler, drop_last=True"
DATA = "    # The global batch stays"
LOOP = "    for points, labels in loader:\n        points, labels = points.to(device), "
LOOP += "labels.to(device)\n        points = points +"
LOSS = "        loss = nn.functional.cross_entropy(model(points), labels)\n"
BACKWARD = "        loss.backward()\n"
STEP = "        optimizer.step()\n"
CALL = "train_one_epoch(ddp_model"
MODEL = "nn.Sequential(nn.Linear(2, 64), nn.SiLU(), nn.Linear(64, 4)).to(device)"
WRAP = "    ddp_model = DistributedDataParallel(model)\n"
OPTIMIZER = (
    "    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)\n"
)
EPOCH = "        sampler.set_epoch(epoch)  # otherwise every epoch has the same order\n"
EVALUATE = "        loss, accuracy = evaluate(model, val_loader, device)\n"
VAL_SET = "    val_set = Subset(val_set, range(rank, len(val_set), world_size))\n"
VAL_LOADER = "DataLoader(val_set, batch_size=args.batch_size)"
SAVE = (
    "    if rank == 0:  # otherwise all ranks write one file at the same time\n"
    '        torch.save(model.state_dict(), "model.pt")\n'
)


def before(line, *code):
    """Return the change that puts lines of code before a line, with its indent."""
    indent = line[: len(line) - len(line.lstrip())]
    return line, "".join(f"{indent}{each}\n" for each in code) + line


def micro_batches(last, *after):
    """Return the change to two micro-batches, of which one synchronizes."""
    lines = [
        "for number in (0, 1):",
        f"    sync = contextlib.nullcontext() if {last} else model.no_sync()",
        "    part = points.chunk(2)[number], labels.chunk(2)[number]",
        "    with sync:",
        "        loss = nn.functional.cross_entropy(model(part[0]), part[1])",
        "        (loss * len(part[1]) / len(labels)).backward()",
        *(f"    {each}" for each in after),
    ]
    lines = "".join(f"        {line}\n" for line in lines)
    zero = "        optimizer.zero_grad()\n"
    return [
        (LOSS + zero + BACKWARD, zero + lines),
        ("import argparse\n", "import argparse\nimport contextlib\n"),
    ]


def average(divisor):
    """Return the changes to an average of one's own, without a wrapper."""
    loop = f"for p in model.parameters(): dist.all_reduce(p.grad); p.grad /= {divisor}"
    return [before(STEP, loop), (WRAP, "    ddp_model = model\n")]


def shard(options="", optimizer_first=False):
    """Return the changes to fully_shard."""
    wrap = f"    ddp_model = fully_shard(model{options})\n"
    lines = OPTIMIZER + wrap if optimizer_first else wrap + OPTIMIZER
    gather = "    state = {n: w.full_tensor() for n, w in model.state_dict().items()}\n"
    return [
        (WRAP + OPTIMIZER, lines),
        ("from torch import nn\n", f"from torch import nn\n{FSDP}"),
        (SAVE, gather + SAVE.replace("model.state_dict()", "state")),
    ]


def ema(condition=""):
    """Return the changes to an average of the weights, which is evaluated."""
    update = f"{condition}[e.lerp_(w.detach(), 0.5) for e, w in zip(ema, weights)]"
    lists = "ema, weights = list(average.parameters()), list(model.parameters())"
    lines = before(EVALUATE.replace("(model", "(average"), lists, update)[1]
    return [
        ("import argparse\n", "import argparse\nimport copy\n"),
        before(OPTIMIZER, "average = copy.deepcopy(model).requires_grad_(False)"),
        (EVALUATE, lines),
    ]


FSDP = "from torch.distributed.fsdp import fully_shard\n"
MESH_OF_ONE = 'dist.init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("a", "b"))'
NO_WRAPPER = ("ddp_model = DistributedDataParallel(model)", "ddp_model = model")
NEGATIVES = """\
        generator = getattr(loader, "mine", None) or torch.Generator().manual_seed(0)
        loader.mine = generator
        negative = torch.randn(COUNT * len(points), 2, generator=generator)PART
        loss = nn.functional.cross_entropy(model(points, negative), labels)
"""
TWO_INPUTS = """

class TwoInputs(nn.Sequential):
    def forward(self, points, other=0):
        return super().forward(points + other)


@torch.no_grad()
def evaluate("""
BUFFER = """

class Recent(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("recent", torch.zeros(2))

    def forward(self, x):
        y = x - self.recent.clone()
        if self.training:
            recent = x.detach().mean(0)
            AVERAGE
            self.recent.copy_(0.9 * self.recent + 0.1 * recent)
        return y


@torch.no_grad()
def evaluate("""
WITH_BUFFER = MODEL.replace("nn.Sequential(", "nn.Sequential(Recent(), ")
GLOBAL_MEAN = "dist.all_reduce(recent); recent = recent / dist.get_world_size()"
SIMILAR = " @ points[:, :1].expand(-1, 4).T, torch.arange(len(points))"
GATHERED = """\
        mine = model(points)
        others = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(others, mine.detach())
        others[dist.get_rank()] = mine
        loss = (mine[:, None] - torch.cat(others)).square().mean()
"""
WEIGHTED = """\
        n = dist.get_world_size()
        drawn = torch.tensor([random.random() for _ in range(n * len(points))])
        drawn = drawn[dist.get_rank() :: n, None]
        logits = model(points + drawn)
        loss = nn.functional.cross_entropy(logits, labels, reduction="none")
        loss = (loss * drawn[:, 0] / drawn.max()).mean()
"""
CLIP = "nn.utils.clip_grad_norm_(model.parameters(), {})"
HEAD = "\n\n@torch.no_grad()\ndef evaluate("
MEANS = (
    "    loss_sum, correct, seen = sums.tolist()\n"
    "    return loss_sum / seen, correct / seen\n",
    "    means = torch.tensor([loss_sum / seen, correct / seen])\n"
    "    dist.all_reduce(means)\n"
    "    return (means / dist.get_world_size()).tolist()\n",
)
NAMES = "names = set('abcdefghijklmnop')"
STREAM = """

class Stream(torch.utils.data.IterableDataset):
    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return iter(self.data)


@torch.no_grad()
def evaluate("""
BY_NAME = "train_set.tensors[0].mul_(torch.tensor([ord(n) for n in names])[:2] / 100)"
TIED = MODEL.replace("nn.SiLU(), ", "nn.SiLU(), nn.Linear(64, 64), nn.Linear(64, 64), ")
TIE = "model[3].weight = model[2].weight"
EMPTIED = f"""\
    with torch.device("meta"):
        model = {TIED.replace(".to(device)", "")}
    {TIE}
    model.to_empty(device=device)
    [nn.init.normal_(w, std=0.3) for w in model.parameters()]
"""
# A name: changes of after.py, and words that must appear, one of which is the cause.
MISTAKES = {
    "no_sampler": ([(LOADER, "shuffle=True, drop_last=True")], "no sampler; row 5"),
    "fixed_rank": (
        [(SAMPLER, "DistributedSampler(train_set, world_size, 0, drop_last=True)")],
        "all ranks train on the same 12 samples; the same rank; row 5",
    ),
    "no_set_epoch": ([(EPOCH, "")], "step 9: pass 2; not told the epoch; row 7"),
    "batch_not_divided": (
        [("args.batch_size // world_size", "args.batch_size")],
        "step 1: 24 samples on one process, 48 on 2; not divided; row 8",
    ),
    "divided_twice": (
        [("args.batch_size // world_size", "args.batch_size // world_size**2")],
        "step 1: 24 samples on one process, 12 on 2; divided twice",
    ),
    "seed_by_rank": (
        [(SAMPLER, SAMPLER.replace(")", ", seed=rank)"))],
        "step 1: 1; a different seed (0, 1); row 5",
    ),
    "another_split": (
        [
            before(
                DATA,
                "train_set, _ = torch.utils.data.random_split(train_set, [144, 55])",
            )
        ],
        "splits the data set differently; random_split; row 4",
    ),
    "unsorted_list": (
        [before(DATA, "train_set = TensorDataset(*train_set[torch.randperm(199)])")],
        "step 1: sample; on rank 0 and rank 1; a different data set; sorted; row 4",
    ),
    "short_last_batch": (
        [(LOADER, "sampler=sampler")],
        "step 9: 7 samples on one process, 6 on 2; the last batch is shorter; row 6",
    ),
    "padding_sampler": (
        [(LOADER, "sampler=sampler"), (SAMPLER, "DistributedSampler(train_set)")],
        "step 9: 7 samples on one process, 8 on 2; repeats samples; row 6",
    ),
    "stream": (
        [
            (HEAD, STREAM),
            ("        train_set, batch", "        Stream(train_set), batch"),
            (LOADER, "drop_last=True"),
        ],
        "all ranks train on the same; each rank reads the whole stream; islice",
    ),
    "own_statistics": (
        [before(LOSS, "points = (points - points.mean(0)) / points.std(0)")],
        "step 1: what the model gets; mean and deviation of its own samples",
    ),
    "same_noise": (
        [
            ("    if rank > 0:  # otherwise every rank draws", "    if False:  #"),
            ("default=0.0)\n    args", "default=0.1)\n    args"),
        ],
        "all ranks draw the same numbers from torch; seed + rank; row 11",
    ),
    "same_negatives": (
        [
            (LOSS, NEGATIVES.replace("COUNT * ", "").replace("PART", "")),
            (HEAD, TWO_INPUTS),
            (MODEL, MODEL.replace("nn.Sequential", "TwoInputs")),
        ],
        "step 1: argument 2 of the model is the same on all ranks; same seed",
    ),
    "same_noise_in_the_model": (
        [
            ("        torch.manual_seed(rank)\n", "        pass\n"),
            (
                MODEL,
                f"{MODEL}\n    model[1].forward = lambda x: x + torch.randn_like(x)",
            ),
        ],
        "step 1: all ranks draw the same numbers from torch",
    ),
    "set_order": (
        [before(DATA, NAMES, BY_NAME)],
        "step 1: one process, started again; the order of a set; sorted(; row 4",
    ),
    "bare_model": (
        [(CALL, "train_one_epoch(model")],
        "step 1: the gradient of 0.weight and 3 more differs; "
        "calls the Sequential, not the DistributedDataParallel around it; row 9",
    ),
    "no_wrapper": (
        [NO_WRAPPER],
        "a model that is in no DistributedDataParallel; row 9",
    ),
    "unfrozen_late": (
        [
            before(WRAP, "model[0].requires_grad_(False)"),
            before(OPTIMIZER, "model[0].requires_grad_(True)"),
        ],
        "step 1: the gradient of 0.weight and 1 more differs; it was frozen",
    ),
    "unfrozen_after_20_steps": (
        [
            before(WRAP, "model[0].requires_grad_(False)"),
            before(EPOCH, "model[0].requires_grad_(epoch > 3)"),
            ('"--epochs", type=int, default=2', '"--epochs", type=int, default=4'),
        ],
        "the gradient of 0.weight and 1 more differs; it was frozen",
    ),
    "no_sync_left_on": (
        micro_batches("number == 2"),
        "differs between the ranks; without synchronization; micro-batch",
    ),
    "mesh_of_one": (
        shard(f", mesh={MESH_OF_ONE}['b']"),
        "differs between the ranks; has 1 of the 2 processes",
    ),
    "sum_averaged": (
        [(LOSS, LOSS.replace("labels)", 'labels, reduction="sum") / 24'))],
        "step 1: the gradients are 1/2 of those of one process; a sum over the batch",
    ),
    "summed": (
        average(1),
        "step 1: the gradients are 2 times those of one process; are summed",
    ),
    "sum_behind_clipping": (
        [
            (LOSS, LOSS.replace("labels)", 'labels, reduction="sum") / 24')),
            before(STEP, CLIP.format(1e-3)),
        ],
        "step 1: the gradients are 1/2 of those of one process; a sum over the batch",
    ),
    "unequal_counts": (
        [(LOSS, LOSS.replace("labels)", "labels, ignore_index=3)"))],
        "step 1: the gradient of; the mean of the ranks' losses; divisor",
    ),
    "drawn_alike_and_dealt_out": (  # which is right; each divides by its own largest
        [
            (LOSS, WEIGHTED),
            before(DATA, "random.seed(0)"),
            ("import os\n", "import os\nimport random\n"),
        ],
        "step 1: what div (after.py:; computes for a sample; on the other samples",
    ),
    "samples_compared": (
        [(LOSS, LOSS.replace("points), labels", f"points){SIMILAR}"))],
        "step 1: what mm (after.py:; 12 numbers, and there 24; gather what is compared",
    ),
    "gathered": (
        [(LOSS, GATHERED)],
        "step 1: the gradient of; what all_gather returns (after.py:; has no gradient",
    ),
    "clipped_early": (
        micro_batches("number == 1", CLIP.format(0.1)),
        "step 1: the gradient of; clips a gradient; after the last backward pass",
    ),
    "clipped_per_rank": (
        [before(STEP, CLIP.format(0.1)), *average(2)],
        "step 1: the gradient of; clips each rank's own gradient; average first",
    ),
    "own_buffer": (
        [(MODEL, WITH_BUFFER), (HEAD, BUFFER.replace("            AVERAGE\n", ""))],
        "after step 1, the buffer 0.recent; from its own samples",
    ),
    "mixes_samples": (
        [(MODEL, f"{MODEL}\n    model[1].forward = lambda x: x - x.mean(0)")],
        "step 1: what sub (after.py:; computes for a sample; on the other samples",
    ),
    "rate_scaled": (
        [("lr=args.lr, ", "lr=args.lr * world_size, ")],
        "step 1: lr is 0.1 on one process and 0.2 on 2 processes; scaled; row 8",
    ),
    "own_metric": (
        [
            before(STEP, "optimizer.param_groups[0]['lr'] = 0.1 * loss.item()"),
        ],
        "step 1: lr is; on rank 0 and; the rank's own metric",
    ),
    "optimizer_first": (
        shard(optimizer_first=True),
        "no weight changes in the whole training; no longer uses; after fully_shard",
    ),
    "unseeded_shards": (
        [*shard(), ("    torch.manual_seed(0)\n", "    torch.manual_seed(rank)\n")],
        "before step 1, 0.weight; shards weights that it has drawn for itself",
    ),
    "untied": (
        [*shard(), (f"    model = {MODEL}\n", EMPTIED)],
        "3.weight were one tensor before to_empty; tie them again",
    ),
    "state_of_one_rank": (
        [before(EPOCH, "optimizer.state.clear() if epoch + rank == 3 else None")],
        "step 9: the state of SGD differs; 4 tensors on rank 0, 0 tensors on rank 1",
    ),
    "weights_of_one_rank": (
        [before(EPOCH, "model[0].weight.data.mul_(1 + rank) if epoch == 2 else None")],
        "step 9; rank 1 changes weights between steps 8 and 9",
    ),
    "uneven_steps": (
        [
            (
                LOOP,
                LOOP.replace(
                    "points, labels in loader",
                    "i, (points, labels) in enumerate(loader)",
                ),
            ),
            before(LOSS, "if i == 5 and dist.get_rank() == 1: break"),
        ],
        "failed; after 5 steps, rank 0 is in backward; rank 0 takes more steps",
    ),
    "buffer_of_some_ranks": (
        [
            before(WRAP, "model.register_buffer('seen', torch.zeros(3))"),
            before(
                BACKWARD,
                "if dist.get_rank() == 0:",
                "    rest = {'tensor': torch.ones(7), 'persistent': False}",
                "    model.module.register_buffer('cache', **rest)",
            ),
        ],
        "failed; cache: a buffer that forward makes on some ranks; register_buffer in",
    ),
    "batch_skipped": (
        [
            before(
                BACKWARD,
                "if dist.get_rank() == 0 and not hasattr(model, 'once'):",
                "    model.once = 1",
                "    continue",
            )
        ],
        "failed; a rank skips batches; (2, 1 forward passes; all-reduce what decides",
    ),
    "evaluation_padded": (
        [
            (VAL_SET, ""),
            (VAL_LOADER, VAL_LOADER[:-1] + ", sampler=DistributedSampler(val_set))"),
        ],
        "of 53 samples that are evaluated, 1 come twice; repeats; row 13",
    ),
    "evaluation_drops": (
        [
            (
                VAL_SET,
                VAL_SET.replace("val_set),", "val_set) // world_size * world_size,"),
            )
        ],
        "of 53 samples that are evaluated, 1 are left out; row 13",
    ),
    "metrics_of_one_rank": (
        [("    dist.all_reduce(sums)\n", "")],
        'rank 0 prints "epoch 1: loss; metrics of its own shard; row 12',
    ),
    "mean_of_means": ([MEANS], "rank 0 prints; a mean of means; row 12"),
    "average_of_rank_0": (
        ema("if rank == 0: "),
        "after step 8: the Sequential that is evaluated; average of the weights (EMA)",
    ),
    "all_ranks_write": (
        [(SAVE, '    torch.save(model.state_dict(), "model.pt")\n')],
        "ranks 0 and 1 both write model.pt; if rank == 0; row 14",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named(mistake, tmp_path):
    """In the first line below the runs, or those that explain it."""
    changes, words = MISTAKES[mistake]
    text = check(tmp_path, *changes, code=1)
    for word in words.split("; "):
        assert word in text, f"{word} is missing in\n{text}"
    assert text.count("  first: ") == 1 and "not shown to be equal" in text


# ---- what is right -------------------------------------------------------------------
CLOSURE = """\
        def closure():
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(points), labels)
            loss.backward()
            mean = loss.detach()
            dist.all_reduce(mean)
            return mean / dist.get_world_size()
        optimizer.step(closure)
"""
ZERO = "        optimizer.zero_grad()\n"
LBFGS = OPTIMIZER.replace("SGD", "LBFGS").replace(
    "lr=args.lr, momentum=0.9", "max_iter=2"
)
TWO = """\
    optimizers = [torch.optim.SGD(model[n].parameters(), args.lr) for n in (0, 2)]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    optimizer.zero_grad()
    optimizer.step = lambda: [each.step() for each in optimizers]
"""
OBJECT = """

class Batch:
    def __init__(self, points):
        self.points = points


class TakesObjects(nn.Sequential):
    def forward(self, batch):
        return super().forward(getattr(batch, "points", batch))


@torch.no_grad()
def evaluate("""
TAKES_OBJECTS = MODEL.replace("nn.Sequential", "TakesObjects")
WARM_UP = "ddp_model(torch.zeros(8, 2)).sum().backward(); model.zero_grad()"
RIGHT = {
    "as_it_is": [],
    "micro_batches": micro_batches("number == 1"),
    "average_of_its_own": average("dist.get_world_size()"),
    "lbfgs": [(LOSS + ZERO + BACKWARD + STEP, CLOSURE), (OPTIMIZER, LBFGS)],
    "two_optimizers": [(OPTIMIZER, TWO)],
    "fully_shard": shard(),
    "tied": [*shard(), (MODEL, f"{TIED}\n    {TIE}")],
    "workers": [(LOADER, f"{LOADER}, num_workers=1, persistent_workers=True")],
    "average_on_all_ranks": ema(),
    "warm_up": [before(OPTIMIZER, WARM_UP)],
    "unfrozen_and_wrapped_again": [
        before(WRAP, "model[0].requires_grad_(False)"),
        before(
            EPOCH,
            "if epoch == 2:",
            "    model[0].requires_grad_(True)",
            "    ddp_model = DistributedDataParallel(model)",
        ),
    ],
    "objects": [
        (HEAD, OBJECT),
        (MODEL, TAKES_OBJECTS),
        (LOSS, LOSS.replace("(points)", "(Batch(points))")),
    ],
    "integers_made_float": [
        before(LOSS, "points = points + 0 * (points * 10).long().float()"),
        (MODEL, f"{MODEL}\n    model[2].weight.data = model[2].weight.float()"),
    ],
    "buffer_of_all": [
        (MODEL, WITH_BUFFER),
        (HEAD, BUFFER.replace("AVERAGE", GLOBAL_MEAN)),
    ],
    "negatives_of_all": [
        (
            LOSS,
            NEGATIVES.replace("COUNT", "dist.get_world_size()").replace(
                "PART", "[dist.get_rank() :: dist.get_world_size()]"
            ),
        ),
        (HEAD, TWO_INPUTS),
        (MODEL, MODEL.replace("nn.Sequential", "TwoInputs")),
    ],
    "sorted_set": [before(DATA, NAMES.replace("set(", "sorted(set(") + ")", BY_NAME)],
}


@pytest.mark.parametrize("script", RIGHT)
def test_what_is_right_is_not_refused(script, tmp_path):
    text = check(tmp_path, *RIGHT[script])
    assert "equal except for rounding" in text and ":  " not in text, text


NOISE = [  # from a generator of one's own, which is no different
    (
        "noise * torch.randn_like(points)",
        "0.1 * torch.randn(points.shape, generator=GENERATOR)",
    ),
    (WRAP, f"    GENERATOR.manual_seed(rank)\n{WRAP}"),
    (HEAD, f"\n\nGENERATOR = torch.Generator()\n{HEAD}"),
]
DRAWS = f"{MODEL}\n    model[1].forward = lambda x: x + 0.1 * torch.randn_like(x)"
NORM = MODEL.replace("nn.SiLU()", "nn.BatchNorm1d(64), nn.SiLU()")
# What differs by nature: changes, flags, and what the note says.
NOTES = {
    "noise": ([], "--noise=0.1", "what the model gets is random: noise"),
    "own_noise": (NOISE, "", "what the model gets is random: noise"),
    "noise_in_the_model": ([(MODEL, DRAWS)], "", "the model draws random numbers"),
    "batch_norm": ([(MODEL, NORM)], "", "the output of 1 (BatchNorm1d)"),
}


@pytest.mark.parametrize("name", NOTES)
def test_what_differs_by_nature_is_a_note(name, tmp_path):
    changes, flags, note = NOTES[name]
    text = check(tmp_path, *changes, flags=flags, code=1)
    assert f"  note:  step 1: {note}" in text and "  first: " not in text
    # With batch norm, each rank evaluates with its own.
    assert ("1.running_mean" in text) == (name == "batch_norm")


def test_two_machines_can_be_faked(tmp_path):
    by_local_rank = SAMPLER.replace("(train_set", "(train_set, world_size, local_rank")
    text = check(tmp_path, (SAMPLER, by_local_rank))
    assert "equal except for rounding" in text
    options = "--processes=1,2 --nodes=2"
    text = check(tmp_path, (SAMPLER, by_local_rank), options=options, code=1)
    assert "ranks with the same LOCAL_RANK train on the same samples" in text


def test_what_was_kept_is_looked_at_again(tmp_path):
    """Without a run, and without torch."""
    kept = tmp_path / "kept"
    options = f"--processes=1,2 --keep={kept}"
    text = check(tmp_path, (EPOCH, ""), options=options, code=1)
    first = text[text.index("  first: ") : text.index("2 processes")]
    words = ["python", FOLDER / "diagnoses.py", kept]
    assert first in commands.run(words, forks=True, code=1).stdout
    assert first in run(tmp_path, f"--keep={kept}", code=1).stdout
    sizes = [path.stat().st_size for path in kept.glob("*/*.trace")]
    assert sum(sizes) < 500_000


def test_a_tensor_has_a_line_of_its_own_in_the_first_steps_only(tmp_path):
    kept = tmp_path / "kept"
    check(tmp_path, options=f"--processes=1,2 --keep={kept}", flags="--epochs=5")
    lines = (kept / "1/0.trace").read_text().splitlines()
    weights = [json.loads(line).get("weights", {}) for line in lines]
    assert sum("0.weight" in each for each in weights) == 1 + 20 + 1


def test_a_run_that_hangs_is_ended_and_explained(tmp_path):
    """Once no rank has done anything for a while."""
    waits = "__import__('time').sleep(3600) if rank == 1 and epoch == 2 else None"
    options = "--processes=1,2 --patience=5"
    text = check(tmp_path, before(EPOCH, waits), options=options, code=1)
    assert "2 processes  failed: it hangs\n" in text
    assert "after 8 steps, rank 0 is in " in text and "rank 0 takes more steps" in text


# ---- failures, and what is left ------------------------------------------------------
CRASH = "ddp_model(torch.ones(1, 2)).sum().backward() if rank == 1 else None"


@pytest.mark.parametrize(
    "change, seen",
    [
        (
            before(OPTIMIZER, "if rank == 1: raise SystemExit('no data')"),
            "2 processes +failed: rank 1: no data",
        ),
        (before(OPTIMIZER, CRASH), "2 processes +failed: rank [01]: .*"),
        (("model.state_dict()", "{}"), "1 process +failed: model.pt has no weights.*"),
        (('"model.pt"', '"another.pt"'), "1 process +failed: it wrote no model.pt"),
        (("main()\n    gc", "man()\n    gc"), "1 process +failed: .* NameError: .*"),
        (("save(model.state_dict()", "save(model"), "1 process +failed: .*more than.*"),
        # Torch's advice on an unused parameter has several lines.
        (
            (MODEL, f"{MODEL}\n    model[0].unused = nn.Linear(2, 2)"),
            ".*rank .: RuntimeError: Expected to have finished reduction.*",
        ),
    ],
)
def test_a_failure_is_shown(change, seen, tmp_path):
    lines = check(tmp_path, change, code=1).splitlines()
    assert any(re.fullmatch(seen, line) for line in lines), lines
    assert "not shown to be equal" in lines
    assert not any("of each run" in line for line in lines)
    assert [path.name for path in tmp_path.glob("*.pt*")] in ([], ["another.pt"])


def test_output_of_any_encoding_is_read(tmp_path):
    check(tmp_path, before(OPTIMIZER, "os.write(1, b'\\xe9\\xff\\n')"))


def test_weights_that_were_there_are_put_back(tmp_path):
    weights, aside = tmp_path / "model.pt", tmp_path / "model.pt.aside"
    weights.write_text("mine")
    check(tmp_path)
    assert weights.read_text() == "mine"
    weights.rename(aside)  # as if a check had been killed
    assert check(tmp_path, code=2) == ""
    assert aside.read_text() == "mine" and not weights.exists()


def test_a_directory_in_the_place_of_the_weights(tmp_path):
    made = ('torch.save(model.state_dict(), "model.pt")', "os.makedirs('model.pt')")
    text = check(tmp_path, made, code=1)
    assert re.search("failed: model.pt is a directory", text)
    assert not (tmp_path / "model.pt").exists()
    mine = tmp_path / "model.pt/mine"
    mine.parent.mkdir()
    mine.touch()
    assert check(tmp_path, made, code=2) == ""
    assert mine.exists()


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT])
def test_a_check_that_is_ended_leaves_nothing(ending, tmp_path):
    """No process, and what was moved aside is back."""
    wait = "open(f'waits-{rank}', 'w').close(), __import__('time').sleep(3600)"
    workers = (LOADER, f"{LOADER}, num_workers=1, persistent_workers=True")
    replace_once(AFTER, workers, before(EVALUATE, wait), target=tmp_path / "after.py")
    (tmp_path / "model.pt").write_text("mine")
    command = f"python {CHECK} --processes=2,1 after.py --epochs=1"
    with commands.start(command, tmp_path / "run", cwd=tmp_path) as job:
        for name in ("waits-0", "waits-1"):
            there = (tmp_path / name).exists
            commands.wait_until(there, commands.LIMIT, job.screen)
        processes = job.look()
        assert len(processes) >= 5  # the check, two ranks, two workers
        processes[0].send_signal(ending)
        code = job.wait().returncode
        assert code in (128 + signal.SIGTERM, 128 + signal.SIGINT, 1, -signal.SIGINT)
        commands.assert_gone(processes, (), commands.LIMIT)
    assert (tmp_path / "model.pt").read_text() == "mine"
    assert not (tmp_path / "model.pt.aside").exists()


# ---- the command, and what it does to the script -------------------------------------
@pytest.mark.parametrize("forks", [True, only_in_release(False)])
def test_the_page_shows_what_the_check_prints(forks, tmp_path):
    copy = shutil.copytree(FOLDER, tmp_path / "copy")
    words = [copy / w if w == "check_yours.py" else w for w in COMMAND.split()]
    done = commands.run(words, tmp_path / "out", forks=forks, cwd=copy)
    number = r"\d\.\de-\d+, in .*"
    lines = [re.sub(number, "", line) for line in done.stdout.splitlines()]
    page = [re.sub(number, "", line) for line in PAGE.splitlines()]
    assert lines == page[page.index(f"$ {COMMAND}") + 1 :][: len(lines)]
    assert "equal except for rounding" in lines


STRIDED = """
import torch, torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(50, 1))
ddp_model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    t = torch.randint(50, (12,))[rank::world_size]
    optimizer.zero_grad()
    (ddp_model(t) - t[:, None] / 50).square().mean().backward()
    optimizer.step()
if rank == 0:
    torch.save(model.state_dict(), "model.pt")
del ddp_model
dist.destroy_process_group()
"""


def test_a_batch_that_is_not_contiguous(tmp_path):
    (tmp_path / "strided.py").write_text(STRIDED)
    done = run(tmp_path, "--processes=1,2", "strided.py", code=None)
    assert "largest difference" in done.stdout


def test_without_numpy(tmp_path):
    """Which torch does not install."""
    (tmp_path / "none").mkdir()
    (tmp_path / "none/numpy.py").write_text("raise ModuleNotFoundError('numpy')")
    replace_once(AFTER, *SMALL, target=tmp_path / "after.py")
    words = ["python", CHECK, "--processes=1,2", "after.py"]
    done = commands.run(words, cwd=tmp_path, PYTHONPATH=tmp_path / "none")
    assert done.stdout.splitlines()[2] == "equal except for rounding"


def test_without_a_seed_the_weights_are_the_same_and_the_data_are_not(tmp_path):
    unseeded = ("    torch.manual_seed(0)\n", "    pass\n")
    assert "equal except" in check(tmp_path, unseeded)
    drawn = ("make_dataset(199, seed=1)", "make_dataset(199, seed=torch.seed())")
    text = check(tmp_path, unseeded, drawn, code=1)
    assert "is not the same on rank 0 and rank 1" in text


@pytest.mark.parametrize(
    "other, says, equal",
    [
        (math.nan, "largest difference nan, in b", False),
        (0.0, "bit for bit: has anything been trained", True),
        (1e-12, "largest difference 1.0e-12, in b", True),
        (1e-8, "perhaps rounding that grew", False),
        (1e-6, "largest difference 1.0e-06, in b", False),
    ],
)
def test_weights_are_compared(other, says, equal, capsys):
    compare = load_program(CHECK).compare
    zero = torch.zeros(2, dtype=torch.float64)
    theirs = {"a": zero, "b": zero + torch.tensor([0.0, other])}
    assert compare({"a": zero, "b": zero}, theirs) == equal
    assert says in capsys.readouterr().out


def test_names_of_a_wrapper_are_told(capsys):
    compare = load_program(CHECK).compare
    assert not compare({"a": torch.zeros(2)}, {"module.a": torch.zeros(2)})
    assert "module. is the wrapper's" in capsys.readouterr().out
    assert not compare({"a": torch.zeros(2)}, {"b": torch.zeros(2)})
    assert "module." not in capsys.readouterr().out


def test_dropout_is_turned_off():
    """In a fork: it changes torch.nn."""
    commands.call_in_forks(compute_without_dropout, [()])


def compute_without_dropout():
    program = load_program(CHECK)
    program.runpy = types.SimpleNamespace(run_path=lambda *_, **__: None)
    os.environ["RANK"] = "0"
    with tempfile.TemporaryDirectory() as folder:
        program.run_exactly("after.py", [], folder)
    x = torch.ones(2, 8, 16)
    for module in (nn.Dropout(0.9), nn.Dropout1d(0.9), nn.AlphaDropout(0.9)):
        assert torch.equal(module(x), x)
    attention = nn.MultiheadAttention(16, 2, dropout=0.9)
    first, second = (attention(x, x, x, need_weights=False)[0] for _ in range(2))
    assert torch.equal(first, second)
    for rnn in (nn.LSTM(16, 16, 2, dropout=0.9), nn.GRU(16, 16, 2, False, False, 0.9)):
        assert torch.equal(rnn(x)[0], rnn(x)[0])


def test_float64_is_kept():
    """Also where a script asks for float32, as the norms of transformers do."""
    x = torch.ones(2, dtype=torch.float64)
    with load_program(CHECK).KeepFloat64():
        kept = [x.float(), x.to(torch.float32), x.to(dtype=torch.float32)]
        kept += [nn.functional.softmax(x, 0, dtype=torch.float32), x.long().float()]
        assert {each.dtype for each in kept} == {torch.float64}
        assert x.bfloat16().float().dtype == torch.float32
    assert x.float().dtype == torch.float32


@pytest.mark.parametrize(
    "words, says",
    [
        (["missing.py"], "there is no file missing.py\n"),
        ([], "name a SCRIPT, or a folder that --keep has made\n"),
        (["--nodes=2", "--processes=2,3", CHECK], "2 nodes do not divide"),
        (["--keep=.", CHECK], "--keep: . is not empty\n"),
        (["--processes=1", CHECK], "'1' is not a list such as 1,2: two runs"),
        (["--processes=0,1", CHECK], "'0,1' is not a list such as 1,2: two runs"),
        (["--processes=1,two", CHECK], "'1,two' is not a list such as 1,2: two runs"),
    ],
)
def test_bad_input(words, says, tmp_path):
    (tmp_path / "file").touch()
    done = run(tmp_path, *words, code=2)
    assert says in done.stderr.splitlines(keepends=True)[-1]
    assert done.stdout == ""


@pytest.mark.parametrize("script", ["ddp.py", "fsdp.py"])
def test_the_other_scripts_are_equal(script, tmp_path):
    words = "--processes=1,2", FOLDER / script, "--noise=0", "--epochs=1"
    done = run(tmp_path, *words)
    assert "equal except for rounding" in done.stdout and ":  " not in done.stdout


@pytest.mark.parametrize("page", ["README.md", "your_own_script/README.md"])
def test_a_page_shows_a_mistake_that_is_named(page, tmp_path):
    (shown,) = re.findall(
        r"^```\n(2 processes .*?)```", (ROOT / page).read_text(), re.M | re.S
    )
    replace_once(AFTER, (CALL, "train_one_epoch(model"), target=tmp_path / "after.py")
    words = "--processes=1,2", "after.py", "--noise=0", "--batch-size=60"
    done = run(tmp_path, *words, code=1)
    number = r"\d\.\de-\d+"
    printed = done.stdout[done.stdout.index("2 processes") :]
    assert re.sub(number, "", printed).startswith(re.sub(number, "", shown))
    assert re.search(number, printed)[0] == re.search(number, shown)[0]


UNCONVERTED = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.DataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
x = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
for _ in range(4):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
torch.save(model.module.state_dict(), "model.pt")
"""


def test_a_script_that_was_not_converted(tmp_path):
    """Its processes train the same, each for itself."""
    (tmp_path / "script.py").write_text(UNCONVERTED)
    done = run(tmp_path, "--processes=1,2", "script.py", code=1)
    for word in ("all ranks train on the same 16 samples", "  note:  nn.DataParallel"):
        assert word in done.stdout
