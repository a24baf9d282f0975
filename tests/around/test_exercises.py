"""exercises/README.md: a check accepts the solution, and says what is wrong otherwise.

Each of MISTAKES is one of the kinds that a check names. What check.py does with an
answer that hangs, fails or ends its process leaves no process behind.
"""

import re
import signal

import pytest

from harness import commands
from harness.stages import ROOT
from tests.conftest import only_in_release
from tests.training import replace_once

pytestmark = pytest.mark.ci

FOLDER = ROOT / "exercises"
PIECES = sorted(path.stem for path in FOLDER.glob("solutions/*.py"))

# {piece: [(a text of the solution, what replaces it, ..., what the check then says)]}
MISTAKES = {
    "ring": [
        (
            "    rank, n = ",
            "    return dist.all_reduce(tensor)\n    rank, n = ",
            "messages",
        ),
        ("tensor_split(n)", "chunk(n)", "it sends [4, 2, 4, 4] numbers of a tensor of"),
        ("        sending.wait()\n", "", "wait() 4 times for 8 collectives"),
        ("dist.isend(outgoing, right)", "dist.send(outgoing, right)", "in send (line"),
        (
            "        sending = dist.isend(outgoing, right)\n",
            "        rank == 0 and dist.send(outgoing, right)\n",
            "        sending.wait()\n",
            "        rank and dist.send(outgoing, right)\n",
            "rank 1: it waits before it has begun to send",
        ),
        (
            "torch.empty_like(incoming)",
            "torch.empty(incoming.shape, dtype=torch.float64)",
            "on 2 ranks, in float32: rank 0: ",
        ),
    ],
    "ddp": [
        ("in module.parameters():", "in []:", "rank 1: it begins with its own weights"),
        (
            "return self.module(*inputs)",
            "dist.barrier()\n        return self.module(*inputs)",
            "forward() calls barrier of 0 numbers, and not no collective",
        ),
        (">= bucket_size", "> bucket_size", "all_reduce of 105 numbers, all_reduce of"),
        (
            ", async_op=True)\n",
            ", async_op=True)\n                work.wait()\n",
            "async",
        ),
        ("numbers /= dist.get_world_size()", "pass", "is 3 times too large, of the me"),
    ],
    "sampler": [
        ("self.seed + self.epoch", "self.seed", "shuffle=True, seed=7"),
        ("torch.Generator()", "torch", "torch's global generator has changed"),
        (
            "self.n = dist.get_rank(), dist.get_world_size()",
            "self.n = dist.get_rank(), 3",
            "on 2",
        ),
    ],
    "resume": [
        (
            "    dist.barrier()  # otherwise",
            "    # otherwise",
            "after a kill while step 2 was saved, load() fails: ",
        ),
        (
            'folder / f"unfinished-{step}"  #',
            'folder / f"step-{step:09}"  #',
            "after a kill while step 2 was saved, load() fails: ",
        ),
        ('f"step-{step:09}"', 'f"step-{step}"', "does it sort names as text"),
        (
            "exist_ok=True)",
            "exist_ok=dist.get_rank() > 0)",
            "exists",
        ),
        (
            '"model": model.state_dict()',
            '"model": dict(model.named_parameters())',
            "batches",
        ),
        ('"step": step,', '"step": step, "random": torch.rand(1),', "save() changes t"),
    ],
    "zero1": [
        ("([self.piece], **o", "(self.weights, **o", "AdamW keeps state for 170 numbe"),
        ("nn.Parameter(piece.clone())", "nn.Parameter(piece)", "is a view into 171 nu"),
        (", **options)\n\n", ', lr=options["lr"])\n\n', "hand on all options"),
        (" / self.ranks\n", "\n", "the gradient of this rank's piece is 3 times too l"),
        ("weight.copy_(new.view_as(weight))", "pass", "are still the old ones"),
        ("        self.piece.grad = None\n", "", "it keeps 114 numbers besides the mo"),
    ],
    "fsdp": [
        (
            "self.block = block\n",
            "self.block = [block]\n",
            "self.block(inputs)",
            "self.block[0](inputs)",
            "eval() does not reach the block",
        ),
        (
            "weight.detach().requires_grad_()",
            "weight",
            "delattr(module, name)",
            "pass",
            "has 5 parameters",
        ),
        ("[dist.get_rank()].clone()", "[dist.get_rank()]", "is a view into 237 number"),
        ("        self.free()\n\n    def flat", "\n    def flat", "before the first f"),
        ("weight.grad = None", "pass", "in the backward pass of a block of"),
        (
            "mine if self.piece.grad is None else self.piece.grad + mine",
            "mine",
            "added to",
        ),
        (
            "outputs = self.block(inputs)\n",
            "self.block(inputs)\n        outputs = self.block(inputs)\n",
            "in 1 steps, the blocks are called [2, 2, 2] times",
        ),
    ],
    "column_row": [
        ("gradient = gradient.clone()", "pass", "Copy's backward() sums into the tens"),
        ("total = part.clone()", "total = part", "Sum's forward() changes what it is"),
        ("[dist.get_rank()].clone()", "[dist.get_rank()]", "clone it"),
        ("linear.weight, dim=0", "linear.weight, dim=1", "Column.weight is"),
        (
            "linear.weight, dim=0))",
            "linear.weight, dim=0))\n        self.whole = [linear]",
            "it needs nothing else of the layer",
        ),
        ("(part) + self.bias", "(part + self.bias)", "y has it 3 times"),
        ("Copy.apply(inputs)", "inputs", "so x goes through Copy, once"),
    ],
    "pipeline": [
        ("min(stages - 1 - stage, count)", "count", "the order is F0 F1 F2 F3 F4 F5"),
        (" / count  # the", "  # the", "a weight's gradient is off by"),
        ("kept = deque()  #", "like = inputs[0]\n    kept = deque()  #", "SIGABRT"),
        (
            "in dist.batch_isend_irecv(operations):",
            "in [each.op(each.tensor, each.peer) for each in operations]:",
            "with nccl, the stages wait for each other forever: stage ",
        ),
        (
            "in dist.batch_isend_irecv(operations):\n        work.wait()",
            "in operations:\n        work.op(work.tensor, work.peer).wait()",
            "the ranks wait for each other: does each begin to send and to receive",
        ),
        (
            "kept.append((x, y))",
            "kept.append((x, y))\n        part.all = [*getattr(part, 'all', []), y]",
            "outputs are still there",
        ),
        ("else x.requires_grad_()", "else x", "call requires_grad_() before the part"),
        ("return x.grad", "dist.barrier()\n        return x.grad", "waits in barrier"),
    ],
}


@pytest.fixture
def run(tmp_path):
    """Return a function that checks an answer, and asserts that no process is left."""

    def run(name, text, code):
        path = tmp_path / f"{name}.py"
        path.write_text(text)
        command = f"python exercises/check.py {name} {path}"
        with commands.start(command, tmp_path / "run", forks=True) as job:
            done = job.wait()
            assert not job.members()
        assert (done.returncode, done.stderr) == (code, ""), done
        return done.stdout

    return run


@pytest.mark.parametrize("name", PIECES)
def test_the_solution_is_right(name, run):
    said = run(name, (FOLDER / f"solutions/{name}.py").read_text(), 0)
    assert said.startswith("Solved. ")


@pytest.mark.parametrize(
    "name", [only_in_release(name, unless=name == "ring") for name in PIECES]
)
def test_the_stub_is_not_written(name, run):
    said = run(name, (FOLDER / f"stubs/{name}.py").read_text(), 1)
    assert " is not written (line " in said


@pytest.mark.release
@pytest.mark.parametrize(
    "name, texts, words",
    [
        pytest.param(name, texts, words, id=f"{name}-{number}")
        for name, mistakes in MISTAKES.items()
        for number, (*texts, words) in enumerate(mistakes)
    ],
)
def test_a_mistake_is_named(name, texts, words, run, tmp_path):
    wrong = tmp_path / "wrong.py"
    pairs = zip(texts[::2], texts[1::2], strict=True)
    replace_once(FOLDER / f"solutions/{name}.py", *pairs, target=wrong)
    said = run(name, wrong.read_text(), 1)
    assert said.startswith("Not solved yet: ") and words in said, said


# {an answer: what the check says of it}
ODD = {
    "import os; os._exit(0)": "rank 0 ended its process, with exit code 0",
    "def all_reduce(tensor:": "SyntaxError: '(' was never closed",
    "from torch import distributed\nrank = distributed.get_rank()\nwhile rank: pass": (
        "rank 1 computes and does not end, in your code (line 3: while"
    ),
}


@pytest.mark.release
@pytest.mark.parametrize("text", ODD)
def test_an_answer_that_ends_its_process_or_does_not_end_is_named(text, run):
    assert ODD[text] in run("ring", text, 1)


@pytest.mark.release
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_no_rank_survives_the_check(ending, tmp_path):
    path = tmp_path / "ring.py"
    path.write_text(f"import time\nopen(f'{tmp_path}/begun', 'a')\ntime.sleep(1000)\n")
    command = f"python exercises/check.py ring {path}"
    with commands.start(command, tmp_path / "run") as job:
        begun = tmp_path / "begun"
        commands.wait_until(lambda: begun.exists() or not job.running(), commands.LIMIT)
        check, *ranks = job.look()
        assert len(ranks) >= 3
        check.send_signal(ending)
        assert job.wait().returncode == 128 + ending
        commands.assert_gone(ranks, [], commands.LIMIT)
        assert "Traceback" not in job.screen()


@pytest.mark.parametrize("words", ["nothing", "ring nothing.py", "ring a b", "ring ."])
def test_a_wrong_name_or_file_is_named(words):
    done = commands.run(f"python exercises/check.py {words}", code=2, forks=True)
    assert not done.stdout and done.stderr.count("\n") == 1


def test_the_pieces_are_listed_as_in_the_readme():
    listed = commands.run("python exercises/check.py", forks=True).stdout
    names = [line.split()[0] for line in listed.splitlines()]
    assert sorted(names) == PIECES
    page = (FOLDER / "README.md").read_text()
    assert re.findall(r"^\| \[(\w+)\]", page, re.MULTILINE) == names
