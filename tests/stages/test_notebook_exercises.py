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

MISTAKES = [
    ("06 exercise 1", "[0, 0, 0, 0]", "[0, 1, 2, 3]", "it is not srun that replaces"),
    ("06 exercise 2", "sbatch --nodes", "srun --nodes", "with sbatch"),
    ("06 exercise 2", "--nodes=4", "--nodes=8", "8 GPUs are 4 nodes"),
    ("06 exercise 2", "--batch-size 256", "--batch-size 32", "still 256"),
    (
        "07 exercise 1",
        '"repeated images": 66.7',
        '"repeated images": 60.0',
        "repeated images is not 60.0 %",
    ),
    ("07 exercise 2", "dtype=torch.float64", "dtype=torch.float32", "float64"),
    (
        "07 exercise 2",
        "errors.square().sum(), len(errors)",
        "errors.square().mean() * len(errors), len(errors)",
        "an empty shard",
    ),
    ("07 exercise 2", "(squares / count) ** 0.5", "squares / count", "instead of"),
    (
        "08 exercise 1",
        "for n in range(1, local_batch_size + 1):",
        "for n in (2**k for k in range(9)):",
        "but 3 would do",
    ),
    ("08 exercise 1", "local_batch_size % n == 0 and ", "", "does not divide"),
    (
        "08 exercise 1",
        "local_batch_size = batch_size // processes",
        "local_batch_size = batch_size",
        "but 1 would do",
    ),
    (
        "08 exercise 2",
        " * len(labels) / len(targets)",
        " / n",
        "n = 4: the gradient is off by",
    ),
    (
        "08 exercise 2",
        "inputs.tensor_split(n), targets.tensor_split(n)",
        "inputs.split(10 // n), targets.split(10 // n)",
        "n = 4: the micro-batches have",
    ),
    (
        "08 exercise 2",
        "(loss * len(labels) / len(targets)).backward()",
        "loss.backward()",
        "n = 2: the gradient is off by",
    ),
    (
        "09 exercise 1",
        "    torch.save(state, temporary)\n    temporary.replace(path)\n",
        "    torch.save(state, path)\n",
        "killed halfway destroys",
    ),
    (
        "09 exercise 1",
        '("model", "optimizer", "scheduler")',
        '("model", "scheduler")',
        "the optimizer has no momentum",
    ),
    (
        "09 exercise 1",
        '    torch.set_rng_state(state["random_state"])\n',
        "",
        "is dropout the same?",
    ),
    (
        "09 exercise 2",
        '"5 processes": "refused"',
        '"5 processes": "different"',
        "5 processes: how many of the 48 images",
    ),
    (
        "10 exercise 1",
        "math.ceil(first / every)",
        "round(first / every)",
        "[12, None] gives 10, not 20",
    ),
    (
        "10 exercise 1",
        "math.ceil(first / every) * every",
        "max(first, every)",
        "[12, None] gives 12, not 20",
    ),
    ("10 exercise 1", "min((", "max((", "who is the first?"),
    ("10 exercise 2", "SIGUSR1, lambda", "SIGUSR2, lambda", "did not catch SIGUSR1"),
    (
        "10 exercise 2",
        "        count += 1\n        if received:\n            break\n",
        "        if received:\n            break\n        count += 1\n",
        "a signal in the second of three: 1, not 2",
    ),
    (
        "10 exercise 2",
        "        if received:\n            break\n",
        "",
        "a signal in the second of three: 3, not 2",
    ),
    ("10 exercise 3", "B:USR1", "USR1", "srun's processes get that signal"),
    ("10 exercise 3", "--time=8:00:00", "--time=8:00", "all of the eight hours"),
    ("10 exercise 3", "@400", "@300", "a step may just have begun"),
]
# Other right answers, which a check must not refuse.
RIGHT = [
    ("06 exercise 2", "--nodes=4", "--exclusive -N 4"),
    ("06 exercise 2", "--gpus-per-node=2 --cpus-per-task=16", "--gres gpu:2 -c 16"),
    ("10 exercise 3", "--time=8:00:00", "--time=480"),
    ("10 exercise 3", "--time=8:00:00", "-t 0-8"),
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
