"""check_yours/: what is right passes, what is wrong is named, as its README says."""

import re
import signal

import pytest

from harness import commands
from harness.stages import ROOT
from tests.conftest import only_in_release
from tests.training import replace_once

pytestmark = pytest.mark.ci

CHECK, AFTER = ROOT / "check_yours", ROOT / "your_own_script/after.py"
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
    words = ["python", CHECK / "__main__.py", *words]
    return commands.run(words, folder / "out", forks=True, cwd=folder, code=code)


# ---- lines of after.py, and changes of them ------------------------------------------
SAMPLER = "DistributedSampler(train_set, drop_last=True)"
LOADER = "sampler=sampler, drop_last=True"
DATA = "    # The global batch stays"
HEADER = "    for points, labels in loader:\n"
MOVE = "        points, labels = points.to(device), labels.to(device)\n"
LOOP = f"{HEADER}{MOVE}        points = points +"
LOSS = "        loss = nn.functional.cross_entropy(model(points), labels)\n"
ZERO, BACKWARD = "        optimizer.zero_grad()\n", "        loss.backward()\n"
STEP = "        optimizer.step()\n"
CALL = "train_one_epoch(ddp_model"
LINEAR = "nn.Linear(2, 64), nn.SiLU(), nn.Linear(64, 4)"
MODEL = f"nn.Sequential({LINEAR}).to(device)"
WRAP = "    ddp_model = DistributedDataParallel(model)\n"
OPTIMIZER = (
    "    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)\n"
)
EPOCH = "        sampler.set_epoch(epoch)  # otherwise every epoch has the same order\n"
EVALUATE = "        loss, accuracy = evaluate(model, val_loader, device)\n"
HEAD = "\n\n@torch.no_grad()\ndef evaluate("
SEED = "    torch.manual_seed(0)\n"
SAVE = (
    "    if rank == 0:  # otherwise all ranks write one file at the same time\n"
    '        torch.save(model.state_dict(), "model.pt")\n'
)
RANKS = "[dist.get_rank() :: dist.get_world_size()]"
FSDP = "from torch.distributed.fsdp import fully_shard\n"
CLIP = "nn.utils.clip_grad_norm_(model.parameters(), {})"


def before(line, *code):
    """Return the change that puts lines of code before a line, with its indent."""
    indent = line[: len(line) - len(line.lstrip())]
    return line, "".join(f"{indent}{each}\n" for each in code) + line


def loss(text):
    """Return the change to another loss."""
    return LOSS, f"        loss = {text}\n"


def backward(*code):
    """Return the change to another way to the gradients."""
    return LOSS + ZERO + BACKWARD, "".join(f"        {line}\n" for line in code)


def micro_batches(last, *after):
    """Return the changes to two micro-batches, of which one synchronizes."""
    lines = [
        "optimizer.zero_grad()",
        "for number in (0, 1):",
        f"    sync = contextlib.nullcontext() if {last} else model.no_sync()",
        "    part = points.chunk(2)[number], labels.chunk(2)[number]",
        "    with sync:",
        "        loss = nn.functional.cross_entropy(model(part[0]), part[1])",
        "        (loss * len(part[1]) / len(labels)).backward()",
        *(f"    {each}" for each in after),
    ]
    return [backward(*lines), ("import argparse\n", "import argparse, contextlib\n")]


def average(divisor, which="True"):
    """Return the changes to an average of one's own, without a wrapper."""
    loop = f"for p in (p for p in model.parameters() if {which}):"
    loop += f" dist.all_reduce(p.grad); p.grad /= {divisor}"
    return [before(STEP, loop), (WRAP, "    ddp_model = model\n")]


def shard(optimizer_first=False):
    """Return the changes to fully_shard."""
    wrap = "    ddp_model = fully_shard(model)\n"
    lines = OPTIMIZER + wrap if optimizer_first else wrap + OPTIMIZER
    gather = "    state = {n: w.full_tensor() for n, w in model.state_dict().items()}\n"
    return [
        (WRAP + OPTIMIZER, lines),
        ("from torch import nn\n", f"from torch import nn\n{FSDP}"),
        (SAVE, gather + SAVE.replace("model.state_dict()", "state")),
    ]


def stops(condition):
    """Return the change to a loop over batches that is left at one of them."""
    header = "    for i, (points, labels) in enumerate(loader):\n"
    return LOOP, LOOP.replace(HEADER, f"{header}        if {condition}: break\n")


def drawn(part):
    """Return the changes to batches that are drawn, without a loader."""
    lines = "    for _ in range(8):\n        index = torch.randint(199, (24,), "
    lines += f"generator=GENERATOR){part}\n        points, labels = "
    return [
        (LOOP, LOOP.replace(HEADER, f"{lines}loader.dataset[index]\n")),
        (HEAD, f"\n\nGENERATOR = torch.Generator()\n{HEAD}"),
        (EPOCH, ""),
    ]


def gathered(text):
    """Return the change to a loss of what all ranks have; one's own has a gradient."""
    lines = [
        "mine, n = model(points), dist.get_world_size()",
        "others = [torch.empty_like(mine) for _ in range(n)]",
        "dist.all_gather(others, mine.detach())",
        "others[dist.get_rank()] = mine",
        "every = [torch.empty_like(labels) for _ in range(n)]",
        "dist.all_gather(every, labels)",
        f"loss = {text}",
    ]
    return LOSS, "".join(f"        {line}\n" for line in lines)


def centered(average):
    """Return the changes to a buffer that training writes and the next step uses."""
    lines = [
        "output, mean = model(points), model.module.mean",
        "loss = nn.functional.cross_entropy(output - mean.clone(), labels)",
        "own = output.detach().mean(0)",
        f"{average}",
        "mean.lerp_(own, 0.5)",
    ]
    return [
        before(WRAP, "model.register_buffer('mean', torch.zeros(4))"),
        (LOSS, "".join(f"        {line}\n" for line in lines)),
    ]


def lbfgs(options="max_iter=3"):
    """Return the changes to LBFGS, whose closure returns a rank's own loss."""
    lines = f"        def closure():\n    {ZERO}    {LOSS}    {BACKWARD}"
    lines += f"            return loss\n{STEP.replace('()', '(closure)')}"
    optimizer = OPTIMIZER.replace("lr=args.lr, momentum=0.9", options)
    changes = [(LOSS + ZERO + BACKWARD + STEP, lines)]
    return [*changes, (OPTIMIZER, optimizer.replace("SGD", "LBFGS"))]


# ---- what is wrong -------------------------------------------------------------------
BATCH = "args.batch_size // world_size"
BY_RANK = SEED, "    torch.manual_seed(rank)\n"
FIXED = "DistributedSampler(train_set, world_size, 0, drop_last=True)"
NO_EPOCH = EPOCH, ""
OTHER_ON_ONE = f"{SAMPLER} if world_size > 1 else range(199)"
WEIGHTED = "torch.utils.data.WeightedRandomSampler(torch.ones(199), 199)"
BY_NAME = "train_set.tensors[0].mul_(torch.tensor([ord(n) for n in names])[:2] / 100)"
SPLIT = "train_set, _ = torch.utils.data.random_split(train_set, [144, 55])"
SHUFFLES = "train_set = TensorDataset(*train_set[torch.randperm(199)])"
DRAWS_BY_RANK = "GENERATOR.manual_seed(rank)"
SHARE = "[: 24 // dist.get_world_size()]"
OWN_MEAN = "points = (points - points.mean(0)) / points.std(0)"
MIXES = f"{MODEL}\n    model[1].forward = lambda x: x - x.mean(0)"
ONE_RANK = "model[0].weight.data.mul_(1 + rank) if epoch == 2 else None"
CLEARS = "optimizer.state.clear() if epoch + rank == 3 else None"
TIMES = "dist.get_world_size()"
ENTROPY = "nn.functional.cross_entropy(model(points), labels)"
SUM = ENTROPY.replace("labels", "labels, reduction='sum'") + " / 24"
IGNORES = ENTROPY.replace("labels", "labels, ignore_index=3")
WHOLE = "nn.functional.cross_entropy(torch.cat(others), torch.cat(every))"
PAIRS = "(mine[:, None] - torch.cat(others)).square().mean()"
OWN_FACTOR = "[p.grad.mul_(1 + dist.get_rank()) for p in model.parameters()]"
SQUARES = f"[p.grad.pow_({TIMES}) for p in model.parameters()]"
OWN_RATE = "optimizer.param_groups[0]['lr'] = 0.1 * loss.item()"
PAST = backward(
    "weights = [*model.parameters()]",
    f"gradients = torch.autograd.grad({ENTROPY}, weights)",
    "for p, p.grad in zip(weights, gradients): pass",
)
MEAN = "dist.all_reduce(own); own /= dist.get_world_size()"
OTHERS = "{n: w + 1e-3 * world_size for n, w in model.state_dict().items()}"
MOVES = "for p, g in zip(model.parameters(), moved)"
SAM = [
    backward(
        f"with model.no_sync(): optimizer.zero_grad(), {ENTROPY}.backward()",
        "moved = [p.grad.clone() for p in model.parameters()]",
        f"{MOVES}: p.data.add_(g)",
        f"optimizer.zero_grad(), {ENTROPY}.backward()",
        f"back = lambda *_: [p.data.sub_(g) {MOVES}] and None",
        "hook = optimizer.register_step_pre_hook(back)",
    ),
    (STEP, f"{STEP}        hook.remove()\n"),
]
# {where the runs part: {the cause that is told: changes of after.py}}
MISTAKES = {
    "step 1: one process, started again, trains something else": {
        "the order of a set": [before(DATA, "names = set('abcdefghijk')", BY_NAME)],
        "drawn without a seed": [(SEED, "    torch.seed()\n")],
    },
    "before step 1, 0.weight and 3 more": {
        "drawn or loaded weights of its own": [*average(TIMES), BY_RANK],
        "each rank shards weights of its own": [*shard(), BY_RANK],
    },
    "step 1: all ranks train on the same": {
        "each sampler was given the same rank": [(SAMPLER, FIXED)],
        "nothing deals the samples out": drawn(""),
    },
    "of the 24 samples are those of one process": {
        "no sampler deals the samples out": [(LOADER, "shuffle=True, drop_last=True")],
        "takes all that WeightedRandomSampler draws": [(SAMPLER, WEIGHTED), NO_EPOCH],
        "and range on one": [(SAMPLER, OTHER_ON_ONE), NO_EPOCH],
        "an order of its own": [(SAMPLER, SAMPLER.replace(")", ", seed=rank)"))],
        "splits the data set differently": [before(DATA, SPLIT)],
    },
    "samples on one process, ": {
        "nor the number of micro-batches is": [(BATCH, "args.batch_size")],
        "divided twice": [(BATCH, "args.batch_size // world_size**2")],
        "do not divide the batch evenly": [(BATCH, "25 // world_size")],
        "the batch is a short one": [(LOADER, "sampler=sampler")],
    },
    "what the Sequential gets on all ranks together is not": {
        "how the samples are dealt": [*drawn(SHARE), before(WRAP, DRAWS_BY_RANK)],
    },
    "of the data set is not on rank": {
        "with random numbers of the rank's own": [before(DATA, SHUFFLES)],
        "follows the": [before(DATA, "train_set.tensors[0].div_(world_size)")],
    },
    "for the same samples, argument 1, is not what it is on one process": {
        "the other samples of the rank's batch": [before(LOSS, OWN_MEAN)],
    },
    "the output of layer `": {"not known; in this layer": [(MODEL, MIXES)]},
    "differs between the ranks": {
        "calls the Sequential, not the Dist": [(CALL, "train_one_epoch(model")],
        "the model is in no Distributed": [(WRAP, "    ddp_model = model\n")],
        "autograd.grad (after.py:30) goes past": [PAST],
        "frozen, or not there, when Distributed": [
            before(WRAP, "model[0].requires_grad_(False)"),
            before(OPTIMIZER, "model[0].requires_grad_(True)"),
        ],
        "the last forward pass before the step": micro_batches("number == 2"),
        "and this one is left out": average(TIMES, "p.dim() > 1"),
        "or it is changed afterwards": [before(STEP, OWN_FACTOR)],
        "something beside the optimizer": [before(EPOCH, ONE_RANK)],
        "so it is the optimizer's state": [before(EPOCH, CLEARS)],
        "uses more of the closure": lbfgs("line_search_fn='strong_wolfe'"),
    },
    "step 1: the gradient of 0.weight and 3 more is not that of one process": {
        "1/2 of those of one process: each rank has the whole": [gathered(WHOLE)],
        "losses add up": [loss(SUM), before(STEP, CLIP.format(1e-3))],
        "2 times those of one process": [loss(f"{TIMES} * {ENTROPY}")],
        "by a count of its own": [loss(IGNORES)],
        "clips when a gradient": micro_batches("number == 1", CLIP.format(0.1)),
        "or before the ranks'": [before(STEP, CLIP.format(0.1)), *average(2)],
        "by a number of its own before": [before(STEP, OWN_FACTOR), *average(2)],
        "clipping by the norm of a shard": [*shard(), before(STEP, OWN_FACTOR)],
        "and 2 times their mean arrives": average(1),
        "and something changes it": [before(STEP, SQUARES)],
    },
    "is not that of one process (by": {
        "what all_gather (after.py:31) returns has none": [gathered(PAIRS)],
        "since the step before, mean is not that": centered("pass"),
        "mean is the same on all ranks": centered(f"{MEAN}; own *= {TIMES}"),
    },
    "within step 1 the ranks get other weights": {"such as a gradient": SAM},
    "all that the optimizers do is that of one process": {
        "beside the weights": [(SAVE, SAVE.replace("model.state_dict()", OTHERS))],
    },
    "no weight changes in the whole training": {
        "has tensors that the model no longer uses": shard(optimizer_first=True),
        "not known; the learning rate is 0": [("lr=args.lr, ", "lr=0.0, ")],
    },
    "step 1: ": {
        "scaled by the world size": [("lr=args.lr, ", "lr=args.lr * world_size, ")],
        "the rank's own": [before(STEP, OWN_RATE)],
        "the same seed when they draw": [
            ("    if rank > 0:  # otherwise every rank draws", "    if False:  #"),
            ("default=0.0)\n    args", "default=0.1)\n    args"),
        ],
    },
    "step 9: pass 2 has the order of the one before": {"the epoch": [(EPOCH, "")]},
    "step 5 is in pass 1 on one process, and in pass 2 on 2": {
        "of steps follows": [stops(f"i == 8 // {TIMES}")]
    },
    "after 5 steps, rank 0 is in ": {
        "had fewer batches": [stops("i == 5 and dist.get_rank() == 1")]
    },
    "ranks 0 and 1 both write model.pt (after.py:": {
        "every rank": [(SAVE, '    torch.save(model.state_dict(), "model.pt")\n')]
    },
}
CASES = [(place, cause) for place, causes in MISTAKES.items() for cause in causes]
FEW = [(place, [*causes][0]) for place, causes in MISTAKES.items() if len(causes) > 3]


@pytest.mark.parametrize(
    "place, cause", [only_in_release(*case, unless=case in FEW) for case in CASES]
)
def test_a_mistake_is_named(place, cause, tmp_path):
    text = check(tmp_path, *MISTAKES[place][cause], code=1)
    first = re.search(r"first: (.*)\n +cause: (.*)\n", text)
    assert first and place in first[1] and cause in first[2], text
    assert text.count("  first: ") == 1


# ---- what is right, and what differs by nature ---------------------------------------
AVERAGE = f"{STEP}        for p in model.parameters():\n"
AVERAGE += f"            dist.all_reduce(p.data)\n            p.data /= {TIMES}\n"
SCALES = "[ord(n) for n in sorted(set('abcdefghijk'))]"
GREW = OTHERS.replace("1e-3", "1e-8")
LOADS = "model.load_state_dict(torch.load(f'{rank}.pt'), assign=True)"
SAVES = "torch.save(model.type('torch.FloatTensor').state_dict(), f'{rank}.pt')"
PRINTS = "rank or print(f'{world_size} processes, {world_size:.1f} s')"
RIGHT = {
    "as_it_is": [],
    "micro_batches": micro_batches("number == 1"),
    "average_of_its_own": average(TIMES),
    "weights_that_are_averaged": [(STEP, AVERAGE), (WRAP, "    ddp_model = model\n")],
    "vmap": [loss(ENTROPY.replace("model", "torch.func.vmap(model)")), *average(TIMES)],
    "lbfgs": lbfgs(),
    "a_list": [(SAVE, SAVE.replace("model.state_dict()", "[model.state_dict()]"))],
    "fully_shard": shard(),
    "workers": [(LOADER, f"{LOADER}, num_workers=1, persistent_workers=True")],
    "drawn_for_the_global_batch": drawn(RANKS),
    "buffer_of_all": centered(MEAN),
    "rounding_that_grew": [(SAVE, SAVE.replace("model.state_dict()", GREW))],
    "loaded_in_float32": [before(WRAP, SAVES, LOADS)],
    "float32": [before(LOSS, "points = points.float() + 0 * points.long().float()")],
    "sorted_set": [before(DATA, BY_NAME.replace("[ord(n) for n in names]", SCALES))],
    "numbers_that_follow_the_world_size": [before(EVALUATE, PRINTS)],
    "scaler": [
        before(OPTIMIZER, "global scaler", "scaler = torch.amp.GradScaler(device)"),
        (BACKWARD + STEP, "        scaler.scale(loss).backward()\n"
         "        scaler.step(optimizer), scaler.update()\n"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("script", ["as_it_is", *map(only_in_release, [*RIGHT][1:])])
def test_what_is_right_is_not_refused(script, tmp_path):
    text = check(tmp_path, *RIGHT[script])
    assert "equal except for rounding" in text and ":  " not in text, text


NORM = MODEL.replace("nn.SiLU()", "nn.BatchNorm1d(64), nn.SiLU()")


def test_what_differs_by_nature_is_a_note(tmp_path):
    """Which does not hide a gradient of a rank's own; nor do equal weights a metric."""
    text = check(tmp_path, ("    dist.all_reduce(sums)\n", ""), code=1)
    assert "2 processes  weights equal" in text and "rank 0's own shard" in text
    text = check(tmp_path, flags="--noise=0.1", code=1)
    assert "  note:  step 1: what the Sequential gets" in text and "first:" not in text
    text = check(tmp_path, (MODEL, NORM), code=1)
    assert "  note:  step 1: the output of layer `1` (BatchNorm1d)" in text
    text = check(tmp_path, (CALL, "train_one_epoch(model"), flags="--noise=0.1", code=1)
    assert "calls the Sequential, not the Dist" in text


@pytest.mark.release
def test_two_machines_can_be_faked(tmp_path):
    by_local_rank = SAMPLER.replace("(train_set", "(train_set, world_size, local_rank")
    assert "equal except for rounding" in check(tmp_path, (SAMPLER, by_local_rank))
    for n in (2, 4):  # in the first, each has a LOCAL_RANK of 0
        options = f"--processes=1,{n} --nodes=2"
        text = check(tmp_path, (SAMPLER, by_local_rank), options=options, code=1)
        assert "ranks with the same LOCAL_RANK" in text


# ---- the command ---------------------------------------------------------------------
def test_a_run_that_hangs_is_ended_and_explained(tmp_path):
    waits = "dist.barrier() if rank == 1 and epoch == 2 else None"
    options = "--processes=1,2 --patience=5"
    text = check(tmp_path, before(EPOCH, waits), options=options, code=1)
    assert re.search(r"after 8 steps, .*rank 1 is in barrier \(after.py:\d+\)", text)


@pytest.mark.parametrize(
    "change, seen",
    [
        (before(OPTIMIZER, "if rank: raise SystemExit('no data')"), "rank 1: no data"),
        (('"model.pt"', '"another.pt"'), "1 process    failed: it wrote no model.pt"),
        (("model.state_dict()", "model"), "write model.state_dict()\nnot shown to"),
        (before(LOSS, "len(None) if dist.get_rank() else 0"), "rank 1: TypeError: "),
        (
            before(LOSS, "points @ torch.ones(2).type('torch.FloatTensor')"),
            "get_default",
        ),
    ],
)
def test_a_failure_is_shown(change, seen, tmp_path):
    text = check(tmp_path, change, code=1)
    assert seen in text and "not shown to be equal" in text


def test_weights_that_were_there_are_put_back(tmp_path):
    """Also if a check is ended while its ranks run."""
    weights, aside = tmp_path / "model.pt", tmp_path / "model.pt.aside"
    weights.write_text("mine")
    wait = "open(f'waits-{rank}', 'w').close(), __import__('time').sleep(3600)"
    replace_once(AFTER, before(EVALUATE, wait), target=tmp_path / "after.py")
    command = f"python {CHECK} --processes=2,1 after.py --epochs=1"
    with commands.start(command, tmp_path / "run", cwd=tmp_path) as job:
        there = (tmp_path / "waits-1").exists
        commands.wait_until(there, commands.LIMIT, job.screen)
        processes = job.look()
        processes[0].send_signal(signal.SIGTERM)
        job.wait()
        commands.assert_gone(processes, (), commands.LIMIT)
    assert weights.read_text() == "mine" and not aside.exists()
    weights.rename(aside)  # as if a check had been killed
    assert check(tmp_path, code=2) == "" and aside.read_text() == "mine"


WRONG = {
    "missing.py": "there is no file missing.py\n",
    f"--nodes=2 --processes=2,3 {AFTER}": "2 nodes do not divide",
    f"--processes=1 {AFTER}": "'1' is not a list such as 1,2: two runs",
}


@pytest.mark.parametrize("words", WRONG)
def test_bad_input_gets_one_line(words, tmp_path):
    done = run(tmp_path, *words.split(), code=2)
    assert WRONG[words] in done.stderr.splitlines(keepends=True)[-1]
    assert done.stdout == ""
