"""your_own_script/hugging_face: fine_tune.py trains the weights of one process.

What its README.md says: so do adapters, on any number of processes; a killed run
resumes; what is saved can be loaded; texts and conversations get the right labels.
"""

import functools
import json
import re
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
import transformers
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch.distributed import checkpoint as dcp
from transformers import AutoModel
from transformers import AutoModelForCausalLM
from transformers import GenerationConfig
from transformers import PreTrainedTokenizerFast

from harness import commands
from harness.stages import ROOT
from tests import spy
from tests.conftest import only_in_release
from tests.training import TRANSFORMERS
from tests.training import load_program
from tests.training import losses
from tests.training import replace_once

pytestmark = [pytest.mark.ci, pytest.mark.slow]
commands.preloaded += TRANSFORMERS

SCRIPTS = ROOT / "your_own_script/hugging_face"
FINE_TUNE, MAKE_MODEL = SCRIPTS / "fine_tune.py", SCRIPTS / "make_model.py"
PLAIN = ROOT / "tests/plain_fine_tune.py"
PAGE = (SCRIPTS / "README.md").read_text()
DOUBLE = ("--dtype=float64", "--epochs=2", "--batch-size=48")
SAMPLES = 480  # of an epoch, whose last batch is dropped
SAVE = "--checkpoint-dir=checkpoints"
LORA = "--lora-rank=4"


def command(script, processes, *arguments):
    """Return the words that start a script; processes: 0 for one without torchrun."""
    if not processes:
        return ["python", script, *arguments]
    launch = ["torchrun", "--standalone", f"--nproc-per-node={processes}"]
    return [*launch, script, *arguments]


def run(words, folder, code=0, prepare=None):
    """Run a script in forks, in the folder `folder`/work; return a commands.Done."""
    work = folder / "work"
    work.mkdir(parents=True, exist_ok=True)
    options = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_OFFLINE": "1"}
    if torch.cuda.device_count() < 2:
        options["CUDA_VISIBLE_DEVICES"] = ""
    # A changed copy can be beside a script.
    prepare = functools.partial(spy.import_again, ("fine_tune", "sharded"), prepare)
    options |= {"forks": True, "cwd": work, "prepare": prepare}
    return commands.run(words, folder, code, **options)


def saved(folder):
    """Return the weights that a script has written."""
    (path,) = (folder / "work").glob("*/*.safetensors")
    return load_file(path)


def max_abs_diff(one, other):
    """Return the largest difference of two models' weights, which have equal names."""
    assert one.keys() == other.keys()
    return max(
        (one[name].double() - other[name].double()).abs().max().item() for name in one
    )


@functools.cache
def models():
    """Return the folder of what `pretrained` makes."""
    return tempfile.TemporaryDirectory()


@functools.cache
def pretrained(kind):
    """Return the folder of a small random model of this kind, by make_model.py."""
    folder = Path(models().name, kind)
    run(command(MAKE_MODEL, 0, kind), folder)
    return folder / "work" / kind


def train_plainly(model, folder):
    """Train in one process without FSDP, in the order of fine_tune.py's samples."""
    for script in (PLAIN, *SCRIPTS.glob("*.py")):  # which it imports
        shutil.copy(script, folder)
    prepare = functools.partial(spy.exact_norm_and_shuffle, SAMPLES)
    done = run(command(folder / PLAIN.name, 0, model, *DOUBLE), folder, prepare=prepare)
    return done.stdout, saved(folder)


def train(model, processes, folder, *flags):
    """Train for two epochs in float64; return the screen and the saved weights.

    Llama's norm computes in float64, see spy.exact_norm.
    """
    words = command(FINE_TUNE, processes, model, *DOUBLE, *flags)
    done = run(words, folder, prepare=functools.partial(spy.exact_norm, folder))
    return done.stdout, saved(folder)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a function that trains a kind of model, once for the same arguments.

    processes: 0 for the plain loop. It returns the folder, the screen and the weights.
    """

    @functools.cache
    def get(kind="llama", processes=1, *flags):
        folder = tmp_path_factory.mktemp(f"{kind}-{processes}")
        if not processes:
            found = train_plainly(pretrained(kind), folder)
        else:
            found = train(pretrained(kind), processes, folder, *flags)
        return folder, *found

    return get


# ---- the same weights ----------------------------------------------------------------
ROWS = [(kind, n, ()) for kind in ("llama", "llama-tied", "gpt2") for n in (1, 2, 3)]
ROWS += [("llama", 2, ("--activation-checkpointing",))]


@pytest.mark.parametrize(
    "kind, processes, flags",
    [only_in_release(*row, unless=row == ("llama", 2, ())) for row in ROWS],
)
def test_the_weights_are_those_of_one_process(kind, processes, flags, trained):
    """And what is printed. On two processes, one has a batch more to evaluate."""
    _, screen, weights = trained(kind, processes, *flags)
    _, expected_screen, expected = trained(kind, 0)
    assert max_abs_diff(weights, expected) <= 1e-10
    assert screen == expected_screen
    first, last = losses(screen)
    assert last < 0.8 * first
    # what was trained is not what was read
    read = load_file(pretrained(kind) / "model.safetensors")
    assert max_abs_diff(weights, read) > 1e-3


def test_a_rank_never_holds_the_whole_model(trained):
    """The collectives of a step: one group per block, the embedding, head and root."""
    folder, *_ = trained("llama", 2)
    model = AutoModelForCausalLM.from_pretrained(pretrained("llama"))
    for rank in range(2):
        seen = torch.load(folder / f"rank-{rank}.pt")
        # Each of two micro-batches: 4 blocks, embedding, head and root in forward; the
        # blocks and the embedding again in backward.
        assert seen["all_gather"]["calls"] == 2 * (7 + 5)
        # Once per step: the first micro-batch keeps its gradients.
        whole = {"calls": 7, "bytes": 8 * model.num_parameters()}
        assert seen["reduce_scatter"] == whole


@pytest.mark.release
def test_bf16_keeps_weights_in_float32(trained, tmp_path):
    words = command(FINE_TUNE, 2, pretrained("llama"), "--bf16", *DOUBLE[1:])
    screen = run(words, tmp_path).stdout
    assert losses(screen) == pytest.approx(losses(trained("llama", 0)[1]), rel=0.02)
    assert {weight.dtype for weight in saved(tmp_path).values()} == {torch.float32}


# ---- what is saved -------------------------------------------------------------------
@pytest.mark.parametrize(
    "kind", ["llama", *map(only_in_release, ("llama-tied", "gpt2"))]
)
def test_the_saved_folder_is_a_model_for_transformers(kind, tmp_path):
    """from_pretrained loads it, all of it, with where to stop."""
    read = shutil.copytree(pretrained(kind), tmp_path / "read")
    GenerationConfig(eos_token_id=[250, 251]).save_pretrained(read)
    run(command(FINE_TUNE, 2, read, "--epochs=1"), tmp_path)
    folder = tmp_path / "work/tuned"
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert model.dtype == torch.float32
    assert model.generation_config.eos_token_id == [250, 251]
    assert saved(tmp_path).keys() == dict(model.named_parameters()).keys()  # tied: once


def kill_in_second_save():
    spy.exact_norm()
    spy.kill_in_save(2)


@pytest.mark.release
@pytest.mark.parametrize(
    "kind, processes, flags",
    [
        ("llama", 3, ()),
        only_in_release("llama-tied", 1, ()),
        only_in_release("llama-tied", 1, (LORA,)),
    ],
)
def test_a_run_killed_while_it_saves_is_resumed(
    kind, processes, flags, trained, tmp_path
):
    """On another number of processes, to the weights of a run that was not killed.

    No shard of the killed save is published.
    """
    words = command(FINE_TUNE, 2, pretrained(kind), *DOUBLE, SAVE, *flags)
    killed = run(words, tmp_path, prepare=kill_in_second_save, code=None)
    folder = tmp_path / "work/checkpoints"
    assert {path.name for path in folder.iterdir()} == {".epoch-0002.tmp", "epoch-0001"}
    (folder / ".epoch-0002.tmp/__7_0.distcp").touch()  # of a run on eight processes
    screen, weights = train(pretrained(kind), processes, tmp_path, SAVE, *flags)
    resumed, *rest = screen.splitlines()
    assert resumed == f"resumed from {Path('checkpoints/epoch-0001')}"
    _, expected_screen, expected = trained(kind, 1 if flags else 0, *flags)
    assert [killed.stdout.splitlines()[0], *rest] == expected_screen.splitlines()
    assert max_abs_diff(weights, expected) <= 1e-10
    shards = [f"__{rank}_0.distcp" for rank in range(processes)]
    names = sorted(path.name for path in (folder / "epoch-0002").iterdir())
    assert names == [".metadata", *shards]


# ---- adapters ------------------------------------------------------------------------
@pytest.mark.release
@pytest.mark.parametrize(
    "kind, processes",
    [("llama", 2), only_in_release("llama", 3), only_in_release("llama-tied", 2)],
)
def test_adapters_are_equal_on_any_number_of_processes(kind, processes, trained):
    """They alone are saved, in checkpoints, too, and reduced: not a frozen embedding.

    Four blocks have seven adapters each, of two matrices.
    """
    _, expected_screen, expected = trained(kind, 1, LORA)
    folder, screen, weights = trained(kind, processes, LORA, SAVE)
    assert max_abs_diff(weights, expected) <= 1e-10
    assert screen == expected_screen
    first, last = losses(screen)
    assert last < first
    names = [[*weights]]
    for path in (folder / "work/checkpoints").iterdir():
        state = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        names.append([name for name in state if name.startswith("model.")])
    assert len(names) == 3  # what was saved last, and a checkpoint per epoch
    for each in names:
        assert len(each) == 4 * 7 * 2
        assert all(re.search(r"\.lora_[AB](\.default)?\.weight$", n) for n in each)
    seen = torch.load(folder / "rank-1.pt")["reduce_scatter"]
    # as many rows on each rank: FSDP pads what the ranks do not divide
    rows = {name: -(-len(w) // processes) * processes for name, w in weights.items()}
    padded = sum(rows[name] * w[0].nbytes for name, w in weights.items())
    assert seen == {"calls": 4, "bytes": padded}


@pytest.mark.release
def test_saved_adapters_are_loaded_by_peft(tmp_path):
    flags = (LORA, "--dtype=bfloat16", "--bf16", "--epochs=1")
    run(command(FINE_TUNE, 2, pretrained("llama"), *flags), tmp_path)
    folder = tmp_path / "work/tuned"
    model = AutoPeftModelForCausalLM.from_pretrained(folder)
    assert model.get_base_model().dtype == torch.bfloat16
    weights = load_file(folder / "adapter_model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    for name, weight in model.named_parameters():
        if "lora_" in name:
            assert weight.equal(weights[name.replace(".default", "")])


# ---- data ----------------------------------------------------------------------------
TEMPLATE = """<begin> {% for each in messages %}
{{ each.role }} {{ each.content }} <end> {% endfor %}
{% if add_generation_prompt %} assistant {% endif %}"""


def save_tokenizer(folder):
    """Save a tokenizer of words."""
    words = ["<end>", "<begin>", *map(str, range(100)), "user", "assistant"]
    tokenizer = Tokenizer(WordLevel({word: n for n, word in enumerate(words)}))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<begin>",
        eos_token="<end>",
        chat_template=TEMPLATE,
    ).save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def messages(*contents):
    roles = ("user", "assistant", "user", "assistant")
    pairs = zip(roles, contents, strict=False)
    return {"messages": [{"role": role, "content": text} for role, text in pairs]}


def read_lines(folder, *lines):
    """Return the samples that fine_tune.py reads of a file with these lines."""
    path = folder / "data.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    tokenizer = save_tokenizer(folder)
    return tokenizer, load_program(FINE_TUNE).read_dataset(path, tokenizer, 40)


def test_a_text_ends_with_the_end_unless_it_is_cut(tmp_path):
    tokenizer, (short, long) = read_lines(
        tmp_path, {"text": "7 8"}, {"text": "7 " * 99}
    )
    tokens, labels = short.T
    assert tokenizer.decode(tokens) == "7 8 <end>" and labels.equal(tokens)
    assert len(long) == 40 and tokenizer.decode(long[:, 0]) == "7 " * 39 + "7"


def test_only_the_last_answer_of_a_conversation_has_labels(tmp_path):
    """What is too long is left out; a template that changes the prompt is refused."""
    said = messages("1 2", "3", "4", "5 6")
    tokenizer, samples = read_lines(tmp_path, said, messages("7 " * 99, "8"))
    (sample,) = samples
    tokens, labels = sample.T
    whole = "<begin> user 1 2 <end> assistant 3 <end> user 4 <end> assistant 5 6 <end>"
    assert tokenizer.decode(tokens) == whole
    assert labels.tolist() == [-100] * 12 + tokens[12:].tolist()
    tokenizer.chat_template = TEMPLATE.replace("assistant {%", "user {%")
    with pytest.raises(ValueError, match="line 1: the answer does not continue"):
        load_program(FINE_TUNE).read_dataset(tmp_path / "data.jsonl", tokenizer, 40)


def test_prompts_are_attended_to_without_being_learned():
    """A label of -100 in the prompt must not hide the prompt from attention."""
    tokens = torch.arange(5, 9)
    labels = torch.tensor([-100, -100, 7, 8])
    collate = load_program(FINE_TUNE).collate
    ((inputs, labels),) = collate([torch.stack((tokens, labels), 1), tokens[:2]])
    assert inputs["input_ids"].tolist() == [[5, 6, 7, 8], [5, 6, 0, 0]]
    assert inputs["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert labels.tolist() == [[-100, 7, 8, -100], [6, -100, -100, -100]]


@pytest.mark.release
def test_it_trains_on_conversations(tmp_path):
    folder = shutil.copytree(pretrained("llama"), tmp_path / "llama")
    save_tokenizer(folder)
    counts = [[*map(str, range(n % 7, 90, 3))][: 8 + n % 20] for n in range(72)]
    lines = [messages(" ".join(one[:4]), " ".join(one[4:])) for one in counts]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    flags = [f"--{name}={tmp_path}/data.jsonl" for name in ("data", "val-data")]
    screen = run(command(FINE_TUNE, 2, folder, *flags), tmp_path).stdout
    assert losses(screen)[-1] < losses(screen)[0]


# ---- make_model.py and its check -----------------------------------------------------
def test_a_small_model_of_a_folder_is_checked(tmp_path):
    """It is loaded as by from_pretrained; a buffer that was not computed is named."""
    config = transformers.Qwen3Config(architectures=["Qwen3ForCausalLM"])
    config.save_pretrained(tmp_path / "large")
    words = command(MAKE_MODEL, 0, tmp_path / "large", "--check")
    made, said = run(words, tmp_path).stdout.splitlines()
    assert re.fullmatch(r"small: \d{3},\d{3} parameters", made)
    assert said == "loaded as by from_pretrained" and f"\n   {said}\n" in PAGE
    config = transformers.GPTNeoXConfig(architectures=["GPTNeoXForCausalLM"])
    config.save_pretrained(tmp_path / "neox")
    words = command(MAKE_MODEL, 0, tmp_path / "neox", "--check")
    assert " is not in the files of small. " in run(words, tmp_path, 1).stdout
    assert said in run([*words, "--rank-0-reads"], tmp_path).stdout
    copy = shutil.copytree(SCRIPTS, tmp_path / "copy")
    replace_once(copy / "sharded.py", ("    model.initialize_weights()\n", ""))
    words = command(copy / MAKE_MODEL.name, 0, "llama", "--check")
    prepare = functools.partial(torch.use_deterministic_algorithms, True)  # to nan
    _, first, second = run(words, tmp_path, 1, prepare).stdout.splitlines()
    assert first.startswith("buffers with other values: model.rotary_emb.inv_freq")
    assert second.startswith("loss nan, with from_pretrained ")


# ---- bad input -----------------------------------------------------------------------
def spoil(what, llama, folder):
    """Make a folder that is not a model that fine_tune.py takes, of a Llama's."""
    folder.mkdir()
    if what != "no weights":
        AutoModel.from_pretrained(llama).save_pretrained(folder)
    if what == "no head":
        path = folder / "config.json"
        path.write_text(path.read_text().replace("LlamaModel", "LlamaForCausalLM"))


@pytest.mark.parametrize(
    "what, line",
    [
        ("no weights", r"argument model: there is no \*.safetensors in \S+"),
        ("no head", "lm_head.weight is not in the files of .*"),
        ("a base model", "config.json is of a LlamaModel, not of a Llama.*"),
        ("--batch-size=10", r".* must be divisible by .* \(4\)"),
        ("--batch-size=512", ".* more than the 505 .*"),
        ("--data=a.jsonl", "--data and --val-data go together"),
        (f"{LORA} --rank-0-reads", "--lora-rank does not go with --rank-0-reads"),
        ("--data=a.jsonl --val-data=a.jsonl", ".*(tokenizer|a.jsonl).*"),
    ],
)
def test_bad_input_gets_one_line(what, line, tmp_path):
    """On each of two ranks, none of which waits for the other."""
    folder, flags = pretrained("llama"), what.split()
    if not what.startswith("--"):
        folder, flags = tmp_path / "model", ()
        spoil(what, pretrained("llama"), folder)
    done = run(command(FINE_TUNE, 2, folder, *flags), tmp_path, code=2)
    lines = {line for rank in done.ranks for line in rank.stderr.splitlines()}
    # On some CPUs, bitsandbytes prints something when peft imports it.
    (said,) = [each for each in lines if "CPU gemm_4bit" not in each]
    assert re.fullmatch(f"fine_tune.py: error: {line}", said), said


# ---- the page ------------------------------------------------------------------------
@pytest.mark.release
def test_the_commands_of_the_page_run_in_turn(tmp_path):
    """As they are typed, by the launcher, and print what the page shows."""
    found = re.findall(r"^\$ ((?:python|torchrun) .*)\n((?:\w.*\n)*)", PAGE, re.M)
    found = [each for each in found if "FOLDER" not in each[0]]
    assert len(found) == 2
    copy = shutil.copytree(SCRIPTS, tmp_path / "copy")
    no_gpu = {} if torch.cuda.device_count() >= 2 else {"CUDA_VISIBLE_DEVICES": ""}
    for number, (words, shown) in enumerate(found):
        done = commands.run(words, tmp_path / str(number), cwd=copy, **no_gpu)
        assert done.stdout == shown or not shown
        numbers = losses(done.stdout)
        assert not numbers or numbers[-1] < numbers[0]
