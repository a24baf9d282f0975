"""Other libraries fine-tune a Hugging Face model as your_own_script/hugging_face does.

What other_libraries/README.md says of them is true; test_neighbors.py compares its
tables with the programs. Most of it changes with versions, so --release runs it.
"""

import functools
import re
import sys

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from harness.stages import ROOT
from tests import spy
from tests.hugging_face_harness import command
from tests.hugging_face_harness import max_abs_diff
from tests.hugging_face_harness import own_lines
from tests.hugging_face_harness import pretrained
from tests.hugging_face_harness import run
from tests.hugging_face_harness import saved
from tests.hugging_face_harness import train_before
from tests.neighbors_harness import FOLDER
from tests.neighbors_harness import docstring
from tests.training import replace_once

pytestmark = pytest.mark.ci

ACCELERATE, TRAINER, CONFIG = (
    FOLDER / f"hf_{name}.py" for name in ("accelerate", "trainer", "distributed_config")
)
SAMPLES = 504  # of an epoch, whose last batch is dropped
DOUBLE = ("--dtype=float64", "--epochs=2")
SHORT = ("--epochs=1", "--batch-size=252")  # two steps
DDP = "a model is in DistributedDataParallel"
# The modules that fully_shard is called for: four blocks and the root, the embedding,
# and the last norm and the head, which are one group with a tied embedding.
SHARDED = {"llama": 8, "llama-tied": 7, "gpt2": 1}

# ---- changes -------------------------------------------------------------------------
OPTIMIZER = "torch.optim.AdamW(model.parameters(), lr=args.lr)"
WITHOUT_DECAY = """torch.optim.AdamW(
        [
            {"params": [each for each in model.parameters() if each.dim() > 1]},
            {
                "params": [each for each in model.parameters() if each.dim() == 1],
                "weight_decay": 0,
            },
        ],
        lr=args.lr,
    )"""
NO_DECAY = (OPTIMIZER, WITHOUT_DECAY)
ONE_MORE = (
    "tokens = count_labels(batch).to(device)",
    "tokens = count_labels(batch) + args.batch_size",
)
# Those of before.py that the Trainer trains the weights of.
OF_TRAINER = {
    "llama": (NO_DECAY,),
    "llama-tied": (NO_DECAY,),
    "gpt2": (NO_DECAY, ONE_MORE),
}
LINE = "    local_batch_size ="  # of the Trainer's program, after the model is made
LOSS_TYPE = (LINE, f'    model.loss_type = "ForCausalLM"\n{LINE}')
DRAW = "model.register_forward_pre_hook(lambda *_: print(torch.rand(1)))"
CPU = ("use_cpu=not torch.cuda.is_available(),", "")
PRINT = '        print("modules sharded'
BY_CONFIG = (
    (
        "from transformers import Trainer\n",
        "from transformers import Trainer\n"
        "from transformers.distributed import DistributedConfig\n",
    ),
    (
        "dtype=getattr(torch, args.dtype)\n",
        "dtype=getattr(torch, args.dtype),\n"
        "        distributed_config=DistributedConfig(fsdp_size=args.processes),\n",
    ),
    ("        fsdp=True,\n", ""),
)


def exact_norm():
    """Do what spy.exact_norm does, and say on standard error that a model is in DDP."""
    spy.exact_norm()
    ddp = nn.parallel.DistributedDataParallel
    spy.call_after(ddp, "__init__", lambda *_: print(DDP, file=sys.stderr))


def exact_loss():
    """Have transformers compute losses in float64, in addition to exact_norm.

    It computes them in float32, whatever the dtype of the model.
    """
    from transformers import PreTrainedModel
    from transformers.loss.loss_utils import fixed_cross_entropy

    exact_norm()

    def loss(logits, labels, vocab_size, num_items_in_batch=None, **_):
        labels = nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
        logits, labels = logits.reshape(-1, vocab_size), labels.flatten()
        return fixed_cross_entropy(logits, labels, num_items_in_batch)

    PreTrainedModel._loss_function = staticmethod(loss)


def as_if_on_gpus():
    """Have Accelerate take the CPUs for GPUs, in addition to exact_loss."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    exact_loss()

    def say_gpus(_, state, *__):
        if state.distributed_type == DistributedType.MULTI_CPU:
            state._shared_state["distributed_type"] = DistributedType.MULTI_GPU

    spy.call_after(PartialState, "__init__", say_gpus)


# ---- runs ----------------------------------------------------------------------------
def changed(program, folder, *replacements):
    """Copy a program and what it imports, and replace texts that are there once."""
    copy = folder / FOLDER.name
    copy.mkdir(parents=True)
    (folder / "your_own_script").symlink_to(ROOT / "your_own_script")
    (copy / "hf_args.py").symlink_to(FOLDER / "hf_args.py")
    replace_once(program, *replacements, target=copy / program.name)
    return copy / program.name


@pytest.fixture
def run_changed(tmp_path):
    """Return a function that runs a changed program, by default for two steps."""

    def get(program, *replacements, kind="llama", flags=SHORT, **options):
        script = changed(program, tmp_path, *replacements)
        words = command(script, 2, pretrained(kind), *flags)
        return run(words, tmp_path, **options)

    return get


@pytest.fixture(scope="module")
def before(tmp_path_factory):
    """Return a function that trains by before.py; it returns the screen and weights."""

    @functools.cache
    def get(kind, *changes):
        folder = tmp_path_factory.mktemp(f"before-{kind}")
        return train_before(pretrained(kind), DOUBLE, SAMPLES, folder, *changes)

    return get


def epochs(screen):
    """Return the lines of the epochs."""
    return re.findall("^epoch .*$", screen, re.MULTILINE)


def number_sharded(screen):
    """Return how many modules were sharded, as a program prints it."""
    (number,) = re.findall(r"^modules sharded by FSDP2: (\d+)$", screen, re.MULTILINE)
    return int(number)


@pytest.fixture(autouse=True)
def on_cpus(device):
    if device == "cuda":
        pytest.skip("the programs have not been tried on GPUs")


# ---- the weights ---------------------------------------------------------------------
# Of a row: the program, its changes, what it is run with; the kind of model; whether it
# shards it, and makes it DDP otherwise; and the changes of before.py.
EQUAL = [
    *((ACCELERATE, (), exact_norm, kind, False, ()) for kind in SHARDED),
    *((CONFIG, (), exact_norm, kind, True, ()) for kind in SHARDED),
    *((TRAINER, (), exact_loss, kind, False, OF_TRAINER[kind]) for kind in SHARDED),
    (TRAINER, (LOSS_TYPE,), exact_loss, "gpt2", False, (NO_DECAY,)),
    (TRAINER, BY_CONFIG, exact_loss, "llama", True, (NO_DECAY,)),
    (TRAINER, (), as_if_on_gpus, "llama", True, (NO_DECAY,)),
    (ACCELERATE, (), as_if_on_gpus, "llama", True, ()),
]


@pytest.mark.release
@pytest.mark.parametrize("program, changes, prepare, kind, shards, of_before", EQUAL)
def test_two_processes_train_the_weights_of_before(
    program, changes, prepare, kind, shards, of_before, run_changed, before, tmp_path
):
    """In float64; the Trainer those of a before.py that decays no norms and biases."""
    flags = {"kind": kind, "flags": DOUBLE, "prepare": prepare}
    done = run_changed(program, *changes, **flags)
    shown, expected = before(kind, *of_before)
    weights = saved(tmp_path)
    # A tied weight has two names in the file that distributed_config saves.
    twice = {"lm_head.weight"} if program == CONFIG and kind != "llama" else set()
    assert weights.keys() - expected.keys() == twice
    for name in twice:
        weight = weights.pop(name)
        assert sum(torch.equal(weight, each) for each in weights.values()) == 1
    assert max_abs_diff(weights, expected) <= 1e-10
    if of_before:  # which changes something
        assert max_abs_diff(weights, before(kind)[1]) > 1e-3
    else:
        assert epochs(done.stdout) == epochs(shown)
        assert len(epochs(shown)) == 2
    assert number_sharded(done.stdout) == (SHARDED[kind] if shards else 0)
    assert [DDP in rank.stderr for rank in done.ranks] == [not shards] * 2
    folder = tmp_path / "work/tuned"
    _, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())


@pytest.mark.release
def test_the_loss_of_the_trainer_is_in_float32(run_changed, before, tmp_path):
    """Which is what is left of the difference: 1.8e-6."""
    run_changed(TRAINER, flags=DOUBLE, prepare=exact_norm)
    _, expected = before("llama", NO_DECAY)
    assert 1e-8 < max_abs_diff(saved(tmp_path), expected) < 1e-5


# The page's losses are those of the toy that torch 2.14 makes.
same_toy = pytest.mark.skipif(
    torch.__version__ < "2.14", reason="this torch draws other weights for the toy"
)


@same_toy
@pytest.mark.release
@pytest.mark.parametrize("program", [ACCELERATE, TRAINER, CONFIG])
def test_a_command_prints_what_its_docstring_shows(program, before, tmp_path):
    """As typed: with Llama's norm in float32, and so up to 1.5e-5 from before.py."""
    words, printed = docstring(program.name)
    places = {"runs/llama": pretrained("llama"), words[3]: program}
    words = [places.get(word, word) for word in words if "--out" not in word]
    screen = run(words, tmp_path).stdout.splitlines()
    assert len(screen) == len(printed)
    for line, shown in zip(screen, printed, strict=True):
        assert re.fullmatch(".*".join(map(re.escape, shown.split("..."))), line)
    changes = OF_TRAINER["llama"] if program == TRAINER else ()
    assert max_abs_diff(saved(tmp_path), before("llama", *changes)[1]) < 1e-4


@same_toy
def test_the_docstrings_show_what_fsdp_prints(before):
    """But the Trainer's shows another norm, which the page explains."""
    text = (FOLDER / "README.md").read_text()
    shown, _ = before("llama")
    _, printed = docstring(CONFIG.name)
    assert epochs(shown) == printed[:2]
    first, _ = re.findall(r"norm of the last gradient ([\d.]+)", shown)
    _, printed = docstring(TRAINER.name)
    other, _ = re.findall(r"'grad_norm': '([\d.]+)", "\n".join(printed))
    assert f"`grad_norm` is {other}, where fsdp.py prints {first}" in text


# ---- what the page says of each ------------------------------------------------------
def test_the_defaults_are_those_of_the_page():
    from accelerate import FullyShardedDataParallelPlugin
    from transformers import TrainingArguments

    assert FullyShardedDataParallelPlugin().fsdp_version == 1
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    assert plugin.auto_wrap_policy is None
    assert not plugin.cpu_ram_efficient_loading
    assert TrainingArguments.lr_scheduler_type == "linear"
    assert TrainingArguments.weight_decay == 0
    assert TrainingArguments.max_grad_norm == 1
    (group,) = torch.optim.AdamW([torch.zeros(1)]).param_groups
    assert group["weight_decay"] == 0.01


OWN_GROUP = """from datetime import timedelta
    dist.init_process_group('gloo', timeout=timedelta(minutes=7))
    """
SHOW = "    print(dist.group.WORLD._get_backend(device).options._timeout)\n"
SETS = "    train_set, val_set ="
SIZE = "fsdp_size=args.processes"
PLAN = '{"transformer.h.*": "free_full_weight"}'
# {claim: (program, changes, options of run_changed, a text on rank 0's screen)}
CLAIMS = {
    "without use_cpu, the Trainer refuses fsdp": (
        TRAINER,
        (CPU,),
        {"code": 1},
        "ValueError: Using fsdp only works in distributed training.\n",
    ),
    "of a GPT-2, the Trainer warns that it does not know the loss": (
        TRAINER,
        (),
        {"kind": "gpt2"},
        "`loss_type=None` was set in the config but it is unrecognized.",
    ),
    "without a policy, Accelerate shards no block": (
        ACCELERATE,
        (('auto_wrap_policy="transformer_based_wrap",', ""),),
        {"prepare": as_if_on_gpus},
        f"modules sharded by FSDP2: {SHARDED['llama'] - 4}\n",
    ),
    "of a GPT-2, only the root is sharded, with a warning": (
        CONFIG,
        (),
        {"kind": "gpt2"},
        "`fsdp_plan` rules ['transformer.embed_tokens', 'transformer.layers.*', "
        "'transformer.norm'] match nothing in GPT2LMHeadModel and will not be applied.",
    ),
    "its blocks are sharded by their names": (
        CONFIG,
        ((SIZE, f"{SIZE}, fsdp_plan={PLAN}"),),
        {"kind": "gpt2"},
        f"modules sharded by FSDP2: {SHARDED['gpt2'] + 4}\n",
    ),
    "a rank waits two hours for another": (
        CONFIG,
        ((SETS, SHOW + SETS),),
        {},
        "2:00:00\n",
    ),
    "unless there is a group": (
        CONFIG,
        (("    model = Auto", f"    {OWN_GROUP}model = Auto"), (SETS, SHOW + SETS)),
        {},
        "0:07:00\n",
    ),
}


@pytest.mark.release
@pytest.mark.parametrize("claim", CLAIMS)
def test_the_page_is_true(claim, run_changed):
    program, changes, options, text = CLAIMS[claim]
    rank, *_ = run_changed(program, *changes, **options).ranks
    assert text in rank.stdout + rank.stderr


@pytest.mark.release
@pytest.mark.parametrize(
    "program, prepare, read, written",
    [
        (ACCELERATE, exact_loss, "bfloat16", "bfloat16"),  # in DDP
        (ACCELERATE, as_if_on_gpus, "bfloat16", "float32"),
        (CONFIG, None, "bfloat16", "bfloat16"),
        (CONFIG, None, "float32", "float32"),
    ],
)
def test_the_dtype_of_weights(program, prepare, read, written, run_changed, tmp_path):
    """With mixed precision, Accelerate's FSDP makes bfloat16 weights float32."""
    flags = (*SHORT, f"--dtype={read}", "--bf16")
    run_changed(program, flags=flags, prepare=prepare)
    dtypes = {weight.dtype for weight in saved(tmp_path).values()}
    assert dtypes == {getattr(torch, written)}


@pytest.mark.release
def test_all_ranks_of_the_trainer_draw_the_same_numbers(run_changed):
    done = run_changed(TRAINER, (LINE, f"    {DRAW}\n{LINE}"))
    first, second = (re.findall("tensor.*", rank.stdout) for rank in done.ranks)
    assert len(set(first)) == len(first) >= 4
    assert first == second


@pytest.mark.release
def test_the_eval_loss_is_not_the_loss_per_token(run_changed, before):
    """Although the weights are those of before.py, and every sample counts."""
    log = "[line['eval_loss'] for line in trainer.state.log_history[1::2]]"
    change = (PRINT, f"        print(*{log})\n{PRINT}")
    done = run_changed(TRAINER, change, flags=DOUBLE, prepare=exact_loss)
    by_trainer = [float(loss) for loss in done.stdout.splitlines()[-2].split()]
    per_token = re.findall("loss ([0-9.]+)", before("llama", NO_DECAY)[0])
    for one, other in zip(by_trainer, map(float, per_token), strict=True):
        assert 5e-4 < abs(one - other) < 5e-3


@pytest.mark.release
def test_one_process_gets_no_group_and_no_shards(tmp_path):
    lines = ["dist.is_initialized()", "hasattr(model, 'set_requires_gradient_sync')"]
    stop = f"    print({', '.join(lines)})\n    sys.exit()\n    rank, device ="
    changes = ("least_processes=2", "least_processes=1"), ("    rank, device =", stop)
    program = changed(CONFIG, tmp_path, *changes)
    words = command(program, 1, pretrained("llama"))
    assert run(words, tmp_path).stdout == "False False\n"


# ---- bad input -----------------------------------------------------------------------
@pytest.mark.parametrize(
    "program, processes, flags, error",
    [
        (CONFIG, 2, (), "there is no *.safetensors in ."),
        (CONFIG, 1, (), "start at least 2 processes"),
        (
            TRAINER,
            1,
            ("--micro-batches=5",),
            "--batch-size must be divisible by processes * --micro-batches",
        ),
        (
            ACCELERATE,
            None,
            (),
            "run this program with torchrun --standalone --nproc-per-node=N",
        ),
    ],
)
def test_bad_input_gets_one_line(program, processes, flags, error, tmp_path):
    words = command(program, processes, ".", *flags)
    done = run(words if processes else ["python", program, "."], tmp_path, code=2)
    for rank in done.ranks or [done]:
        assert own_lines(rank.stderr) == [f"{program.name}: error: {error}"]
    assert not list((tmp_path / "work").iterdir())
