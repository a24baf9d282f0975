"""The exercises: an empty answer fails, the solution passes, each mistake is named.

MISTAKES has wrong answers: the exercise, a text of its solution, what stands there
instead, and what the check then says. Where the answer is a program, the text is one of
that program. Only imports, exercises and checks are run, in this process; what a check
starts is a fork.
"""

import ast
import collections
import contextlib
import io
import re
from typing import NamedTuple

import nbformat
import pytest

from harness.stages import ROOT
from harness.stages import notebooks
from nbtools import lesson
from tests.conftest import only_in_ci

AFTER_UNFREEZING = """        wrapped = DistributedDataParallel(model)
    output = wrapped(images[shard])
    loss = nn.functional.cross_entropy(output, target[shard])
    optimizer.zero_grad()
    loss.backward()
"""
BY_HAND = """    output = wrapped(images[shard])
    loss = nn.functional.cross_entropy(output, target[shard])
    optimizer.zero_grad()
    loss.backward()
    for weight in backbone.parameters():
        if weight.grad is not None:
            dist.all_reduce(weight.grad)
            weight.grad /= world_size
"""
MISTAKES = [
    (
        "01 exercise 1",
        '"order in this stage": False',
        '"order in this stage": True',
        "is the same in the two runs",
    ),
    (
        "01 exercise 1",
        '    "initial weights": True,\n',
        "",
        "no prediction for 'initial weights'",
    ),
    ("01 exercise 2", "(seed + epoch)", "(seed)", "begins with ["),
    (
        "01 exercise 2",
        "order[rank:batch_size:world_size]",
        "order[rank * (batch_size // world_size) :][: batch_size // world_size]",
        "rank 0 of 3, your answer begins with",
    ),
    ("01 exercise 2", "randperm(n,", "randperm(1440,", "epoch 2, rank 0 of 2"),
    ("01 exercise 2", "rank:batch_size:", "rank:48:", "has 24 images instead of 6"),
    (
        "02 exercise 1",
        'removeprefix("module.")',
        'lstrip("module.")',
        "module.embedding became",
    ),
    (
        "02 exercise 1",
        'removeprefix("module.")',
        'replace("module.", "")',
        "a.module.b became ['a.b']",
    ),
    (
        "02 exercise 1",
        'removeprefix("module.")',
        "partition('.')[2]",
        "weight became ['']",
    ),
    (
        "02 exercise 2",
        'reduction="none"',
        'reduction="mean"',
        "does an image on the GPU with 13 weigh",
    ),
    (
        "02 exercise 2",
        "self.model(inputs)",
        "self.model(inputs).detach()",
        "the loss has no gradient",
    ),
    (
        "02 exercise 2",
        "return nn.functional.cross_entropy(",
        "return outputs\n        nn.functional.cross_entropy(",
        "return losses, not logits",
    ),
    ("03 exercise 1", "(21, 12)", "(11, 22)", "rank 0: a = 21, b = 12"),
    (
        "03 exercise 2",
        "        wrapped = DistributedDataParallel(model)\n    output",
        "    output",
        "gradient of 0.weight and 1 more differs between the ranks",
    ),
    (
        "03 exercise 2",
        "        backbone.requires_grad_(True)\n",
        "        pass\n",
        "0.weight is off by",
    ),
    (
        "03 exercise 2",
        "if rank == 0:\n    torch.save",
        "if rank == 2:\n    torch.save",
        "has not saved its weights",
    ),
    (
        "03 exercise 2",
        "output = wrapped(images[shard])",
        "output = model(images[shard])",
        "differs between the ranks",
    ),
    ("03 exercise 3", ", sampler=sampler", "", "all ranks train on the same 6 samples"),
    ("03 exercise 3", "wrapped(x)", "model(x)", "differs between the ranks"),
    (
        "03 exercise 3",
        "if dist.get_rank() == 0:\n    print",
        "if True:\n    print",
        "let rank 0 alone print",
    ),
    ("03 exercise 3", "range(3)", "range(2)", "it trains other weights than"),
    (
        "03 exercise 3",
        "local_batch_size = 12 //",
        "local_batch_size = dist.get_rank() + 12 //",
        "",
    ),
    (
        "03 exercise 3",
        "for _ in range(3):\n",
        "for _ in range(3):\n    loader.epoch()\n",
        "AttributeError: 'DataLoader' object has no attribute 'epoch' (",
    ),
    (
        "03 mistakes exercise 1",
        "/ len(x)",
        "/ batch_size",
        "the gradients are 1/2 of those of one process",
    ),
    ("03 mistakes exercise 1", "/ len(x)", "/ batch_size / 2", ""),
    (
        "03 mistakes exercise 1",
        "dist.get_world_size(), sampler=sampler",
        "1",
        "all ranks train on the same",
    ),
    ("04 exercise 1", "tensor = [1, 1]", "tensor = [0, 0]", "the tensor is not [0, 0]"),
    ("04 exercise 1", "numbers = [0, 0]", "numbers = [1, 1]", "the list is not [1, 1]"),
    ("04 exercise 2", "str(nproc)", "nproc", "WORLD_SIZE must be a string"),
    (
        "04 exercise 2",
        '"LOCAL_RANK": str(rank)',
        '"LOCAL_RANK": "0"',
        "LOCAL_RANK must be 1",
    ),
    (
        "04 exercise 2",
        '        "MASTER_ADDR": "127.0.0.1",\n',
        "",
        "MASTER_ADDR is missing",
    ),
    (
        "05 exercise 2",
        "first.float() @ second.float().T",
        "first @ second.T",
        "the loss is off by",
    ),
    (
        "05 exercise 2",
        "with torch.autocast(images.device.type, torch.bfloat16):\n"
        "        first, second = "
        "network(images), network(texts)",
        "network.bfloat16()\n    first, second = "
        "network(images.bfloat16()), network(texts.bfloat16())",
        "weights are torch.bfloat16 from now on",
    ),
    (
        "05 exercise 2",
        "with torch.autocast(images.device.type, torch.bfloat16):",
        "with torch.no_grad(), torch.autocast('cpu', torch.bfloat16):",
        "no gradient gets to the network",
    ),
    (
        "05 exercise 2",
        "network(images), network(texts)",
        "network(images), network(texts).detach()",
        "the gradient is",
    ),
    (
        "05 exercise 1",
        '"x + w": "float32"',
        '"x + w": "bfloat16"',
        "x + w is not bfloat16",
    ),
    ("05 fp16 exercise 1", "    scaler.unscale_(optimizer)\n", "", "is off by"),
    (
        "05 fp16 exercise 1",
        "    nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n",
        "",
        "is off by",
    ),
    (
        "05 fp16 exercise 1",
        "    scaler.unscale_(optimizer)\n",
        "    scaler.unscale_(optimizer)\n    scaler.unscale_(optimizer)\n",
        "unscale_() has already been called",
    ),
    (
        "05 fp16 exercise 1",
        "    scaler.step(optimizer)\n",
        "    optimizer.step()\n    scaler.unscale_(optimizer)\n",
        "unscale_() has already been called",
    ),
]
# Other right answers, which a check must not refuse.
RIGHT = [
    ("03 exercise 2", AFTER_UNFREEZING, BY_HAND),
]


# ---- the exercises -------------------------------------------------------------------
class Exercise(NamedTuple):
    """empty: the answer's cell as it is; imports: what the two cells need of others."""

    name: str
    stage: str
    imports: str
    empty: str
    check: str


def exercises(path):
    """Return the exercises of a notebook."""
    cells = nbformat.read(path, as_version=4).cells
    code = [cell for cell in cells if cell.cell_type == "code"]
    body = ast.parse(code[0].source).body
    found = []
    for empty, check in zip(code, code[1:], strict=False):
        if check.metadata.get("tags") == ["check"]:
            assert empty.metadata.get("tags") == ["exercise"]
            name = re.search(r"def (\w*exercise_\d+)\(\):", check.source)[1]
            title = f"{path.parent.name[:2]} {name.replace('_', ' ')}"
            used = set(re.findall(r"\w+", empty.source + check.source))
            lines = [ast.unparse(node) for node in body if imports(node) & used]
            found.append(
                Exercise(
                    title,
                    path.parent.name,
                    "\n".join(lines),
                    empty.source,
                    check.source,
                )
            )
    return found


def imports(statement):
    """Return the names that a statement imports."""
    if not isinstance(statement, (ast.Import, ast.ImportFrom)):
        return set()
    names = [alias.asname or alias.name for alias in statement.names]
    return {name.partition(".")[0] for name in names}


EXERCISES = {each.name: each for path in notebooks() for each in exercises(path)}


def solution(exercise):
    """Return the solution of an exercise, with the imports of its file."""
    text = (ROOT / exercise.stage / "solutions.py").read_text()
    parts = re.split(r"^# -+ (.*exercise \d+) -+\n", text, flags=re.MULTILINE)
    return parts[0], dict(zip(parts[1::2], parts[2::2], strict=True))[exercise.name[3:]]


def program(exercise):
    """Return the program that solves an exercise, or None if its answer is a cell."""
    values = {}
    if not re.match(r"(repaired|converted) = None", exercise.empty):
        return None
    exec(solution(exercise)[1], values)
    if "converted" in values:
        return (ROOT / values["converted"]).read_text()
    original = re.search(r'"(\S+/demos/\S+\.py)"', exercise.check)[1]
    return replaced((ROOT / original).read_text(), values["bug"], values["repair"])


def said(exercise, answer):
    """Return the last line that a check prints after an answer."""
    output = io.StringIO()
    source = "\n".join([exercise.imports, answer, exercise.check])
    with contextlib.redirect_stdout(output):
        exec(source, {"lesson": lesson})
    return output.getvalue().splitlines()[-1]


def replaced(text, old, new):
    assert text.count(old) == 1, (old, text)
    return text.replace(old, new)


@pytest.fixture
def say(tmp_path, monkeypatch):
    """Return a function: what a check says of a solution with a text replaced."""
    monkeypatch.setattr(lesson, "FORKS", "all")

    def say(name, text="", replacement=""):
        exercise = EXERCISES[name]
        monkeypatch.chdir(ROOT / exercise.stage)  # as in Jupyter
        imports, answer = solution(exercise)
        if written := program(exercise):
            file = tmp_path / "answer.py"
            file.write_text(replaced(written, text, replacement) if text else written)
            variable = exercise.empty.partition(" ")[0]
            return said(exercise, f"{variable} = {str(file)!r}")
        answer = replaced(answer, text, replacement) if text else answer
        return said(exercise, f"{imports}\n{answer}")

    return say


def cases(rows):
    """Return the cases of a test. Those whose check starts processes take seconds."""
    starts = re.compile(r"lesson\.(run|assert)")
    return [
        only_in_ci(*row, unless=not starts.search(EXERCISES[row[0]].check))
        for row in rows
    ]


# ---- the tests -----------------------------------------------------------------------
@pytest.mark.parametrize("name", cases([name] for name in EXERCISES))
def test_an_exercise_is_solved_by_its_solution_only(name, say):
    exercise = EXERCISES[name]
    # The message is the check's own, and neither empty nor Python's.
    assert re.match(
        r"Not solved yet: (?!\w+(Error|:)).{10,}", said(exercise, exercise.empty)
    )
    assert re.match(r"Solved\. \w.{30,}\.$", say(name))


@pytest.mark.parametrize("name, text, replacement, words", cases(MISTAKES))
def test_a_mistake_is_named(name, text, replacement, words, say):
    answer = say(name, text, replacement)
    assert answer.startswith("Not solved yet: ") and words in answer, answer


@pytest.mark.parametrize("name, text, replacement", cases(RIGHT))
def test_another_right_answer_is_not_refused(name, text, replacement, say):
    assert say(name, text, replacement).startswith("Solved.")


def test_the_solutions_are_linked():
    for path in [path for path in notebooks() if exercises(path)]:
        assert "](solutions.py)" in path.read_text(), path


def test_every_exercise_has_its_mistakes():
    """Three of a function or a program, one of a prediction."""
    counted = collections.Counter(name for name, *_ in MISTAKES)
    for name, exercise in EXERCISES.items():
        longer = program(exercise) or re.search(r"^(def|class) ", exercise.empty, re.M)
        assert counted[name] >= (3 if longer else 1), name
    assert counted.keys() <= EXERCISES.keys()
