"""Other libraries fine-tune a Hugging Face model as your_own_script/hugging_face does.

What docs/other_libraries.md says of them is true. tests/test_neighbors.py compares its
tables with the programs.
"""

import functools
import re
import sys

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from tests import spy
from tests.neighbors_harness import FOLDER
from tests.neighbors_harness import docstring
from tests.training import TRANSFORMERS
from tests.training import replace_once
from tools import harness
from tools.stages import ROOT

pytestmark = pytest.mark.ci

harness.preloaded += TRANSFORMERS

SCRIPTS = ROOT / "your_own_script/hugging_face"
ACCELERATE, TRAINER = "hf_accelerate.py", "hf_trainer.py"
CONFIG = "hf_distributed_config.py"
PROGRAMS = (ACCELERATE, TRAINER, CONFIG)
SAMPLES = 504  # of an epoch, whose last batch is dropped
DOUBLE = ("--dtype=float64", "--epochs=2")
SHORT = ("--epochs=1", "--batch-size=252")  # two steps
DDP = "a model is in DistributedDataParallel"
QUIET = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_OFFLINE": "1"}
NORMS = r"(?:norm of the last gradient |'grad_norm': ')([\d.]+)"
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
BEFORE = {
    "as it is": [],
    "no decay of norms and biases": [NO_DECAY],
    "a token more per sequence, too": [NO_DECAY, ONE_MORE],
}
CPU = "use_cpu=not torch.cuda.is_available(),"
PRINT = '        print("modules sharded'
BY_CONFIG = [
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
]


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
def run(command, folder, code=0, **options):
    """Run a command in forks, in the folder `folder`/work; return a harness.Done."""
    work = folder / "work"
    work.mkdir(parents=True, exist_ok=True)
    options |= {"CUDA_VISIBLE_DEVICES": "", **QUIET}
    return harness.run(command, folder, code, forks=True, cwd=work, **options)


def launch(program, *arguments, processes=2):
    """Return the words of torchrun's command; a program's name is one of FOLDER's."""
    start = ["torchrun", "--standalone", f"--nproc-per-node={processes}"]
    return [*start, FOLDER / program, *arguments]


def changed(program, folder, *replacements):
    """Copy a program and what it imports, and replace texts that are there once."""
    copy = folder / "recipes/neighbors"
    copy.mkdir(parents=True)
    (folder / "your_own_script").symlink_to(ROOT / "your_own_script")
    (copy / "hf_args.py").symlink_to(FOLDER / "hf_args.py")
    replace_once(FOLDER / program, *replacements, target=copy / program)
    return copy / program


def saved(folder):
    """Return the weights that a command saved to `tuned`."""
    return load_file(folder / "work/tuned/model.safetensors")


def max_abs_diff(one, other):
    """Return the largest difference of the weights of `other` from those of `one`."""
    return max((one[name] - other[name]).abs().max().item() for name in other)


def epochs(screen):
    """Return the lines of the epochs."""
    return re.findall("^epoch .*$", screen, re.MULTILINE)


def in_ddp(done):
    """Return for each rank whether it made a model DDP, after exact_norm."""
    return [DDP in rank.stderr for rank in done.ranks]


def number_sharded(screen):
    """Return how many modules were sharded, as a program prints it."""
    (number,) = re.findall(r"^modules sharded by FSDP2: (\d+)$", screen, re.MULTILINE)
    return int(number)


@pytest.fixture(autouse=True)
def on_cpus(device):
    if device == "cuda":
        pytest.skip("the programs have not been tried on GPUs")


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """Return a function that gives the folder of a model of this kind."""

    @functools.cache
    def get(kind):
        folder = tmp_path_factory.mktemp(kind)
        run(["python", SCRIPTS / "make_model.py", kind], folder)
        return folder / "work" / kind

    return get


@pytest.fixture(scope="module")
def before(pretrained, tmp_path_factory):
    """Return a function that trains by before.py, in the order of fsdp.py's samples.

    change: a key of BEFORE; returns the screen and the weights.
    """

    @functools.cache
    def get(kind, change="as it is"):
        folder = tmp_path_factory.mktemp(f"before-{kind}")
        script = folder / "before.py"
        replace_once(SCRIPTS / "before.py", *BEFORE[change], target=script)
        prepare = functools.partial(spy.exact_norm_and_shuffle, SAMPLES)
        done = run(
            ["python", script, pretrained(kind), *DOUBLE], folder, prepare=prepare
        )
        return done.stdout, saved(folder)

    return get


# ---- the weights ---------------------------------------------------------------------
@pytest.mark.release
@pytest.mark.parametrize("kind", ["llama", "llama-tied", "gpt2"])
@pytest.mark.parametrize("program", [ACCELERATE, CONFIG])
def test_two_processes_train_the_weights_of_before(
    program, kind, pretrained, before, tmp_path
):
    """In float64. On CPUs, Accelerate takes DDP; distributed_config shards."""
    command = launch(program, pretrained(kind), *DOUBLE)
    done = run(command, tmp_path, prepare=exact_norm)
    shown, expected = before(kind)
    weights = saved(tmp_path)
    assert max_abs_diff(weights, expected) <= 1e-10
    assert epochs(done.stdout) == epochs(shown)
    assert len(epochs(shown)) == 2
    by_config = program == CONFIG
    assert number_sharded(done.stdout) == (SHARDED[kind] if by_config else 0)
    assert in_ddp(done) == [not by_config] * 2
    # A tied weight has two names in the file that distributed_config saves.
    twice = {"lm_head.weight"} if by_config and kind != "llama" else set()
    assert weights.keys() - expected.keys() == twice
    for name in twice:
        same = [
            other for other in expected if torch.equal(weights[name], weights[other])
        ]
        assert len(same) == 1
    folder = tmp_path / "work/tuned"
    _, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())


@pytest.mark.release
@pytest.mark.parametrize(
    "kind, change",
    [
        ("llama", "no decay of norms and biases"),
        ("llama-tied", "no decay of norms and biases"),
        ("gpt2", "a token more per sequence, too"),
    ],
)
def test_the_trainer_trains_the_weights_of_a_changed_before(
    kind, change, pretrained, before, tmp_path
):
    """It decays no norms and biases, and counts a token per sequence more on GPT-2.

    On CPUs, it takes DDP.
    """
    command = launch(TRAINER, pretrained(kind), *DOUBLE)
    done = run(command, tmp_path, prepare=exact_loss)
    weights = saved(tmp_path)
    assert max_abs_diff(weights, before(kind, change)[1]) <= 1e-10
    assert max_abs_diff(weights, before(kind)[1]) > 1e-3
    assert number_sharded(done.stdout) == 0
    assert in_ddp(done) == [True, True]


@pytest.mark.release
def test_the_loss_of_the_trainer_is_in_float32(pretrained, before, tmp_path):
    """Which is what is left of the difference: 1.8e-6."""
    command = launch(TRAINER, pretrained("llama"), *DOUBLE)
    run(command, tmp_path, prepare=exact_norm)
    _, expected = before("llama", "no decay of norms and biases")
    assert 1e-8 < max_abs_diff(saved(tmp_path), expected) < 1e-5


@pytest.mark.release
def test_the_trainer_counts_right_if_told_the_type_of_the_loss(
    pretrained, before, tmp_path
):
    line = "    local_batch_size ="
    told = (line, f'    model.loss_type = "ForCausalLM"\n{line}')
    program = changed(TRAINER, tmp_path, told)
    run(launch(program, pretrained("gpt2"), *DOUBLE), tmp_path, prepare=exact_loss)
    _, expected = before("gpt2", "no decay of norms and biases")
    assert max_abs_diff(saved(tmp_path), expected) <= 1e-10


@pytest.mark.release
def test_the_trainer_trains_what_distributed_config_sharded(
    pretrained, before, tmp_path
):
    program = changed(TRAINER, tmp_path, *BY_CONFIG)
    command = launch(program, pretrained("llama"), *DOUBLE)
    done = run(command, tmp_path, prepare=exact_loss)
    _, expected = before("llama", "no decay of norms and biases")
    assert max_abs_diff(saved(tmp_path), expected) <= 1e-10
    assert number_sharded(done.stdout) == SHARDED["llama"]


@pytest.mark.release
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_command_prints_what_its_docstring_shows(
    program, pretrained, before, tmp_path
):
    """As typed: with Llama's norm in float32, and so up to 1.5e-5 from before.py."""
    command, printed = docstring(program)
    places = {"runs/llama": pretrained("llama"), command[3]: FOLDER / program}
    words = [places.get(word, word) for word in command if "--out" not in word]
    screen = run(words, tmp_path).stdout.splitlines()
    assert len(screen) == len(printed)
    for line, shown in zip(screen, printed, strict=True):
        assert re.fullmatch(".*".join(map(re.escape, shown.split("..."))), line)
    is_trainer = program == TRAINER
    change = "no decay of norms and biases" if is_trainer else "as it is"
    assert max_abs_diff(saved(tmp_path), before("llama", change)[1]) < 1e-4


def test_the_page_shows_what_fsdp_prints(before):
    """And the Trainer's docstring shows another norm, which the page explains."""
    text = (ROOT / "docs/other_libraries.md").read_text()
    shown, _ = before("llama")
    _, printed = docstring(CONFIG)
    assert epochs(shown) == printed[:2]
    assert "\n".join(epochs(shown)) in text
    _, printed = docstring(TRAINER)
    first, _ = re.findall(NORMS, shown)
    other, _ = re.findall(NORMS, "\n".join(printed))
    assert f"`grad_norm` is {other}, where fsdp.py prints {first}" in text


@pytest.mark.release
@pytest.mark.parametrize("program", [ACCELERATE, TRAINER])
def test_it_shards_if_accelerate_takes_the_cpus_for_gpus(
    program, pretrained, before, tmp_path
):
    command = launch(program, pretrained("llama"), *DOUBLE)
    done = run(command, tmp_path, prepare=as_if_on_gpus)
    change = "no decay of norms and biases" if program == TRAINER else "as it is"
    assert max_abs_diff(saved(tmp_path), before("llama", change)[1]) <= 1e-10
    assert number_sharded(done.stdout) == SHARDED["llama"]


# ---- what the page says of Accelerate ------------------------------------------------
@pytest.fixture
def run_changed(pretrained, tmp_path):
    """Return a function that runs a changed program for two steps; see `changed`."""

    def get(program, *replacements, kind="llama", flags=(), **options):
        script = changed(program, tmp_path, *replacements)
        command = launch(script, pretrained(kind), *SHORT, *flags)
        return run(command, tmp_path, **options)

    return get


@pytest.mark.release
def test_without_cpu_accelerate_lets_each_process_train_alone(run_changed):
    change = ("        cpu=not torch.cuda.is_available(),\n", "")
    first, second = run_changed(ACCELERATE, change).ranks
    assert first.stdout == second.stdout  # the second prints only if it is alone
    assert len(epochs(first.stdout)) == 1


@pytest.mark.release
def test_without_a_policy_accelerate_shards_no_blocks(run_changed):
    change = ('auto_wrap_policy="transformer_based_wrap",', "")
    done = run_changed(ACCELERATE, change, prepare=as_if_on_gpus)
    assert number_sharded(done.stdout) == SHARDED["llama"] - 4


@pytest.mark.release
@pytest.mark.parametrize(
    "prepare, dtype", [(exact_loss, torch.bfloat16), (as_if_on_gpus, torch.float32)]
)
def test_with_fsdp_accelerate_makes_bfloat16_weights_float32(
    prepare, dtype, run_changed, tmp_path
):
    """With mixed precision, and not with DDP."""
    flags = ("--dtype=bfloat16", "--bf16")
    run_changed(ACCELERATE, flags=flags, prepare=prepare)
    assert {weight.dtype for weight in saved(tmp_path).values()} == {dtype}


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


# ---- what it says of the Trainer -----------------------------------------------------
@pytest.mark.release
def test_without_use_cpu_the_trainer_refuses_fsdp(run_changed):
    done = run_changed(TRAINER, (CPU, ""), code=None)
    for rank in done.ranks:
        assert rank.returncode == 1
        error = "ValueError: Using fsdp only works in distributed training."
        assert rank.stderr.endswith(error + "\n")


@pytest.mark.release
def test_without_use_cpu_the_trainer_lets_each_process_train_alone(run_changed):
    done = run_changed(TRAINER, (CPU, ""), ("fsdp=True,", ""))
    for rank in done.ranks:  # the second prints only if it is alone
        assert number_sharded(rank.stdout) == 0


@pytest.mark.release
def test_all_ranks_of_the_trainer_draw_the_same_numbers(run_changed):
    draw = "model.register_forward_pre_hook(lambda *_: print(torch.rand(1)))"
    line = "    local_batch_size ="
    done = run_changed(TRAINER, (line, f"    {draw}\n{line}"))
    first, second = (re.findall("tensor.*", rank.stdout) for rank in done.ranks)
    assert len(set(first)) == len(first) >= 4
    assert first == second


@pytest.mark.release
def test_the_trainer_warns(run_changed):
    """DDP does, on CPUs; and transformers does, of the loss that it counts wrongly."""
    stderr = run_changed(TRAINER, kind="gpt2").ranks[0].stderr
    assert "find_unused_parameters=True was specified in DDP constructor" in stderr
    assert "`loss_type=None` was set in the config but it is unrecognized." in stderr


@pytest.mark.release
def test_the_eval_loss_is_not_the_loss_per_token(pretrained, before, tmp_path):
    """Although the weights are those of before.py, and every sample counts."""
    log = "[line['eval_loss'] for line in trainer.state.log_history[1::2]]"
    program = changed(TRAINER, tmp_path, (PRINT, f"        print(*{log})\n{PRINT}"))
    command = launch(program, pretrained("llama"), *DOUBLE)
    screen = run(command, tmp_path, prepare=exact_loss).stdout.splitlines()
    by_trainer = [float(loss) for loss in screen[-2].split()]
    shown, weights = before("llama", "no decay of norms and biases")
    per_token = [float(loss) for loss in re.findall("loss ([0-9.]+)", shown)]
    assert max_abs_diff(saved(tmp_path), weights) <= 1e-10
    for one, other in zip(by_trainer, per_token, strict=True):
        assert 5e-4 < abs(one - other) < 5e-3


# ---- what it says of distributed_config ----------------------------------------------
def test_only_the_root_of_gpt2_is_sharded(run_changed):
    """With a warning, unless one names its blocks."""
    plan = '{"transformer.h.*": "free_full_weight"}'
    size = "fsdp_size=args.processes"
    change = (size, f"{size}, fsdp_plan={plan}")
    done = run_changed(CONFIG, change, kind="gpt2")
    assert number_sharded(done.stdout) == 4 + SHARDED["gpt2"]
    warning = (
        "`fsdp_plan` rules ['transformer.embed_tokens', 'transformer.layers.*', "
        "'transformer.norm'] match nothing in GPT2LMHeadModel and will not be applied."
    )
    assert warning in done.ranks[0].stderr


@pytest.mark.release
def test_one_process_gets_no_group_and_no_shards(pretrained, tmp_path):
    lines = ["dist.is_initialized()", "hasattr(model, 'set_requires_gradient_sync')"]
    stop = f"    print({', '.join(lines)})\n    sys.exit()\n    rank, device ="
    changes = ("least_processes=2", "least_processes=1"), ("    rank, device =", stop)
    program = changed(CONFIG, tmp_path, *changes)
    command = launch(program, pretrained("llama"), processes=1)
    assert run(command, tmp_path).stdout == "False False\n"


@pytest.mark.release
@pytest.mark.parametrize(
    "made, timeout",
    [
        ("", "2:00:00"),
        (
            "from datetime import timedelta\n"
            "    dist.init_process_group('gloo', timeout=timedelta(minutes=7))\n    ",
            "0:07:00",
        ),
    ],
    ids=["its own group", "a group made before"],
)
def test_how_long_a_rank_waits_for_another(made, timeout, run_changed):
    show = "    print(dist.group.WORLD._get_backend(device).options._timeout)\n"
    changes = [
        ("    model = Auto", f"    {made}model = Auto"),
        ("    train_set, val_set =", f"{show}    train_set, val_set ="),
    ]
    done = run_changed(CONFIG, *changes)
    assert done.ranks[0].stdout.startswith(f"{timeout}\n")


@pytest.mark.release
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_it_keeps_the_dtype_of_the_weights(dtype, run_changed, tmp_path):
    run_changed(CONFIG, flags=(f"--dtype={dtype}", "--bf16"))
    dtypes = {weight.dtype for weight in saved(tmp_path).values()}
    assert dtypes == {getattr(torch, dtype)}


# ---- bad input -----------------------------------------------------------------------
@pytest.mark.parametrize(
    "program, processes, flags, error",
    [
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
    command = ["python", FOLDER / program, "."]
    if processes:
        command = launch(program, ".", *flags, processes=processes)
    done = run(command, tmp_path, code=2)
    assert done.stderr == f"{program}: error: {error}\n"
    assert not list((tmp_path / "work").iterdir())


def test_a_folder_without_weights(tmp_path):
    done = run(launch(CONFIG, "."), tmp_path, code=2)
    for rank in done.ranks:
        assert rank.stderr == f"{CONFIG}: error: there is no *.safetensors in .\n"
