"""your_own_script/hugging_face: FSDP2 trains the weights that one process trains.

So does LoRA on any number of processes; what is saved can be loaded; the page is true.
"""

import ast
import contextlib
import functools
import importlib.util
import io
import json
import re
import resource
import runpy
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import AutoModel
from transformers import AutoModelForCausalLM
from transformers import GenerationConfig
from transformers import PreTrainedTokenizerFast

from harness import commands
from tests import spy
from tests.conftest import only_in_release
from tests.hugging_face_harness import BEFORE
from tests.hugging_face_harness import FSDP
from tests.hugging_face_harness import LORA
from tests.hugging_face_harness import SCRIPTS
from tests.hugging_face_harness import command
from tests.hugging_face_harness import max_abs_diff
from tests.hugging_face_harness import own_lines
from tests.hugging_face_harness import pretrained
from tests.hugging_face_harness import run
from tests.hugging_face_harness import saved
from tests.hugging_face_harness import train_before
from tests.training import load_program
from tests.training import losses
from tests.training import replace_once

pytestmark = [pytest.mark.ci, pytest.mark.slow]

SHARDED = SCRIPTS / "sharded.py"
PAGES = ("README.md", "conversations.md", "qlora.md")
PAGE = "\n".join((SCRIPTS / name).read_text() for name in PAGES)
DOUBLE = ("--dtype=float64", "--epochs=2", "--batch-size=48")
SAMPLES = 480  # of an epoch, whose last batch is dropped
SAVE = "--checkpoint-dir=checkpoints"
PROMPT = torch.tensor([[5, 8, 11, 14, 17, 20, 23, 26]])


def train(script, model, processes, folder, *flags):
    """Train for two epochs in float64; return the screen and the saved weights.

    before.py takes the samples in the order of fsdp.py's. Llama's norm computes in
    float64, see spy.exact_norm.
    """
    if script == BEFORE:
        return train_before(model, DOUBLE, SAMPLES, folder)
    words = command(script, processes, model, *DOUBLE, *flags)
    done = run(words, folder, prepare=functools.partial(spy.exact_norm, folder))
    return done.stdout, saved(folder)


def changed(script, folder, *replacements):
    """Copy the scripts, and replace texts of one, each of which is there once."""
    copy = shutil.copytree(SCRIPTS, folder / "copy")
    replace_once(copy / script.name, *replacements)
    return copy / script.name


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a function that trains a kind of model, once for the same arguments.

    It returns the folder, the screen and the weights.
    """

    @functools.cache
    def get(script, kind="llama", processes=1, *flags):
        folder = tmp_path_factory.mktemp(f"{script.stem}-{kind}")
        return folder, *train(script, pretrained(kind), processes, folder, *flags)

    return get


# ---- the same weights ----------------------------------------------------------------
FULL = [(kind, n, ()) for kind in ("llama", "llama-tied", "gpt2") for n in (1, 2, 3)]
FULL += [("llama", 2, ("--activation-checkpointing",))]


@pytest.mark.parametrize(
    "kind, processes, flags",
    [only_in_release(*row, unless=row == ("llama", 2, ())) for row in FULL],
)
def test_fsdp_trains_the_weights_of_before(kind, processes, flags, trained):
    """And print the same. On two processes, one has a batch more to evaluate."""
    _, screen, weights = trained(FSDP, kind, processes, *flags)
    _, expected_screen, expected = trained(BEFORE, kind)
    assert max_abs_diff(weights, expected) <= 1e-10
    assert screen == expected_screen
    first, last = losses(screen)
    assert last < 0.8 * first
    # what was trained is not what was read
    read = load_file(pretrained(kind) / "model.safetensors")
    assert max_abs_diff(weights, read) > 1e-3


def test_a_rank_never_holds_the_whole_model(trained):
    """The collectives of a step: one group per block, the embedding, head and root."""
    folder, *_ = trained(FSDP, "llama", 2)
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
    words = command(FSDP, 2, pretrained("llama"), "--bf16", *DOUBLE[1:])
    screen = run(words, tmp_path).stdout
    exact = losses(trained(BEFORE)[1])
    assert losses(screen) == pytest.approx(exact, rel=0.02)
    assert {weight.dtype for weight in saved(tmp_path).values()} == {torch.float32}


SMALL = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
SMALL |= {"vocab_size": 256, "bos_token_id": 0, "eos_token_id": 0}
WIDE = {"max_position_embeddings": 128, "intermediate_size": 128}
GROUPED = {**WIDE, "num_key_value_heads": 2}
FAMILIES = {
    "Falcon": {"ffn_hidden_size": 128},
    "Granite": GROUPED,
    "Mistral": GROUPED,
    "OPT": {"ffn_dim": 128, "word_embed_proj_dim": 64, "dropout": 0.0}
    | {"max_position_embeddings": 128},
    "Phi": WIDE,
    "Qwen2": GROUPED,
    "StableLm": GROUPED,
    "Starcoder2": GROUPED,
}


def save_model(family, shape, folder):
    """Save a small random model of a family; return its folder."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SMALL, **shape)
    AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(folder)
    return folder


@pytest.mark.release
@pytest.mark.parametrize("family", FAMILIES)
def test_other_families_are_trained_without_a_change(family, tmp_path):
    """To 1e-4 only: most norms compute in float32, whose rounding AdamW enlarges."""
    model = save_model(family, FAMILIES[family], tmp_path / family)
    expected_screen, expected = train(BEFORE, model, 1, tmp_path / "before")
    screen, weights = train(FSDP, model, 2, tmp_path)
    assert max_abs_diff(weights, expected) <= 1e-4
    assert screen == expected_screen
    first, last = losses(screen)
    assert last < 0.8 * first


# ---- what is saved -------------------------------------------------------------------
@pytest.mark.parametrize(
    "kind", ["llama", *map(only_in_release, ("llama-tied", "gpt2"))]
)
def test_the_saved_folder_is_a_model_for_transformers(kind, tmp_path):
    """from_pretrained loads it, all of it, and it generates what the script printed."""
    read = shutil.copytree(pretrained(kind), tmp_path / "read")
    GenerationConfig(eos_token_id=[250, 251]).save_pretrained(read)
    screen = run(command(FSDP, 2, read, "--epochs=1"), tmp_path).stdout
    folder = tmp_path / "work/tuned"
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert model.dtype == torch.float32
    # otherwise a chat model forgets where to stop
    assert model.generation_config.eos_token_id == [250, 251]
    assert saved(tmp_path).keys() == dict(model.named_parameters()).keys()  # tied: once
    assert f"generated: {generate(model)}" in screen


def generate(model):
    """Return how a model continues the prompt of the scripts, as they print it."""
    text = model.eval().generate(input_ids=PROMPT, max_new_tokens=6, do_sample=False)
    return " ".join(map(str, text[0, PROMPT.shape[1] :].tolist()))


def kill_in_second_save():
    spy.exact_norm()
    spy.kill_in_save(2)


@pytest.mark.parametrize(
    "script, kind, processes",
    [
        (FSDP, "llama", 3),
        only_in_release(FSDP, "llama-tied", 1),
        only_in_release(LORA, "llama-tied", 1),
    ],
)
def test_a_run_killed_while_it_saves_is_resumed(
    script, kind, processes, trained, tmp_path
):
    """On another number of processes, to the weights of a run that was not killed.

    No shard of the killed save is published.
    """
    words = command(script, 2, pretrained(kind), *DOUBLE, SAVE)
    killed = run(words, tmp_path, prepare=kill_in_second_save, code=None)
    folder = tmp_path / "work/checkpoints"
    assert {path.name for path in folder.iterdir()} == {".epoch-0002.tmp", "epoch-0001"}
    (folder / ".epoch-0002.tmp/__7_0.distcp").touch()  # of a run on eight processes
    screen, weights = train(script, pretrained(kind), processes, tmp_path, SAVE)
    resumed, *rest = screen.splitlines()
    assert resumed == f"resumed from {Path('checkpoints/epoch-0001')}"
    _, expected_screen, expected = trained(BEFORE if script == FSDP else LORA, kind)
    assert [killed.stdout.splitlines()[0], *rest] == expected_screen.splitlines()
    assert max_abs_diff(weights, expected) <= 1e-10
    assert {path.name for path in folder.iterdir()} == {"epoch-0001", "epoch-0002"}
    shards = [f"__{rank}_0.distcp" for rank in range(processes)]
    names = sorted(path.name for path in (folder / "epoch-0002").iterdir())
    assert names == [".metadata", *shards]


@pytest.mark.parametrize(
    "script", [BEFORE, FSDP, only_in_release(LORA)], ids=lambda path: path.name
)
def test_a_resumed_run_has_the_learning_rate_that_is_asked_for(script, tmp_path):
    """Not that of the checkpoint: with next to none, the weights stay as they are."""
    words = command(script, 2, pretrained("llama"), SAVE)
    run([*words, "--epochs=1"], tmp_path)
    first = saved(tmp_path)
    done = run([*words, "--epochs=2", "--lr=1e-12"], tmp_path)
    assert "resumed from" in done.stdout
    assert max_abs_diff(saved(tmp_path), first) < 1e-6


def fail_in_evaluation():
    """Have the first forward pass of an evaluation raise an error."""

    def fail(module, _):
        if not module.training:
            raise RuntimeError("evaluation fails")

    register_module_forward_pre_hook(fail)


@pytest.mark.parametrize(
    "script", [only_in_release(BEFORE), FSDP], ids=lambda path: path.name
)
def test_an_evaluation_that_fails_loses_no_epoch(script, tmp_path):
    words = command(script, 2, pretrained("llama"), SAVE, "--epochs=1")
    done = run(words, tmp_path, prepare=fail_in_evaluation, code=1)
    assert "evaluation fails" in done.stderr
    (saved,) = (tmp_path / "work/checkpoints").iterdir()
    assert saved.name in ("checkpoint.pt", "epoch-0001")


@pytest.mark.parametrize("script, rows", [(BEFORE, 8), (FSDP, 4)])
def test_evaluation_takes_a_micro_batch_at_a_time(script, rows, monkeypatch):
    """Otherwise it needs more memory than training, and fails after an epoch of it.

    rows: of 24 sequences in three micro-batches, on two ranks with fsdp.py.
    """
    monkeypatch.setattr(dist, "get_world_size", lambda *_: 2)
    monkeypatch.setattr(dist, "get_rank", lambda *_: 0)
    args = SimpleNamespace(batch_size=24, micro_batches=3)
    training, evaluation = load_program(script).make_loaders(None, args)
    ((_, labels),) = next(iter(evaluation))
    assert [len(labels) for _, labels in next(iter(training))] == [rows] * 3
    assert len(labels) == rows


# ---- the parts -----------------------------------------------------------------------
def llava():
    """Return a model of 3 blocks, before which is a vision tower of 2."""
    small = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    vision = transformers.CLIPVisionConfig(num_hidden_layers=2, patch_size=8, **small)
    text = transformers.LlamaConfig(num_hidden_layers=3, vocab_size=64, **small)
    config = transformers.LlavaConfig(vision_config=vision, text_config=text)
    return transformers.LlavaForConditionalGeneration(config)


def t5():
    """Return a model whose list of blocks is the encoder's, and half of it."""
    small = {"d_model": 32, "num_heads": 2, "num_layers": 2}
    config = transformers.T5Config(vocab_size=8, d_kv=16, d_ff=64, **small)
    return transformers.T5ForConditionalGeneration(config)


def vit():
    """Return a classifier, which has no embedding with a weight, and no head."""
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**shape))


def without_blocks():
    """Return a model without a list that is as long as config.json says."""
    model = llava()
    model.config.text_config.num_hidden_layers = 5
    return model


ENDS = ["model.language_model.embed_tokens", "lm_head"]
IN_LLAVA = [*ENDS, *(f"model.language_model.layers.{n}" for n in range(3))]
IN_VIT = [f"vit.layers.{n}" for n in range(2)]
SAYS = "[0-9,]+ of [0-9,]+ parameters are in no block.*\n"


def assert_sharded(make_model, groups, says):
    """Be a process in which shard_model makes these groups, beside that of the root."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    with torch.device("meta"):
        model = make_model()
    sharded = load_program(SHARDED)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            sharded.shard_model(model, dist.init_device_mesh("cpu", (1,)), bf16=False)
        except sharded.ModelError as error:
            said.write(str(error))
    assert re.fullmatch(says, said.getvalue()), said.getvalue()
    found = [name for name, m in model.named_modules() if isinstance(m, FSDPModule)]
    assert set(found) == {"", *groups} if groups else not found
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "make_model, groups, says",
    [
        (llava, IN_LLAVA, SAYS),
        (t5, ["encoder.block.0", "encoder.block.1"], SAYS),
        (vit, IN_VIT, ""),
        (without_blocks, [], "there is no list of 5 blocks: .*"),
    ],
)
def test_blocks_are_found_by_their_number(make_model, groups, says):
    """With a line about what stays whole, if that is much."""
    commands.call_in_forks(assert_sharded, [(make_model, groups, says)])


def test_prompts_are_attended_to_without_being_learned():
    """A label of -100 in the prompt must not hide the prompt from attention."""
    collate = runpy.run_path(BEFORE)["collate"]
    ((inputs, labels),) = collate([torch.arange(5, 9), torch.arange(5, 7)])
    assert inputs["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert labels.tolist() == [[6, 7, 8, -100], [6, -100, -100, -100]]


# ---- names in the files --------------------------------------------------------------
CODE = re.findall(r"^( *)```python\n(.*?)^\1```", PAGE, re.DOTALL | re.MULTILINE)
CODE = [re.sub(f"^{indent}", "", block, flags=re.M) for indent, block in CODE]
LOAD = (
    "    load_weights(model, args.model)  # each rank reads its slices of the files\n"
)
IMPORT = "from sharded import load_weights\n"


def code_with(text):
    """Return the Python code of the page that has a text."""
    (block,) = [block for block in CODE if text in block]
    return block


def functions_with(text):
    """Return (of fsdp.py, of the page) for each function in the block with a text."""
    program, block, pairs = FSDP.read_text(), code_with(text), []
    for source in ast.parse(block).body:
        (own,) = (
            each for each in ast.parse(program).body if _name(each) == source.name
        )
        pairs.append(
            [
                ast.get_source_segment(*each)
                for each in ((program, own), (block, source))
            ]
        )
    return pairs


def _name(node):
    return getattr(node, "name", None)


@pytest.mark.release
def test_files_of_a_base_model(trained, tmp_path):
    """The names of the GPT-2 that one downloads are without "transformer."."""
    base = tmp_path / "base"
    AutoModel.from_pretrained(pretrained("gpt2")).save_pretrained(base)
    assert "wte.weight" in load_file(base / "model.safetensors")
    edit_config(base, architectures=None)
    screen, weights = train(FSDP, base, 2, tmp_path)
    _, expected_screen, expected = trained(BEFORE, "gpt2")
    assert screen == expected_screen
    assert max_abs_diff(weights, expected) <= 1e-10


@pytest.mark.release
@pytest.mark.parametrize("by", ["embed_out", "load_from_rank_0"])
def test_files_of_other_names(by, tmp_path):
    """By the lines of the page, for a GPT-NeoX: fsdp.py itself does not find its head.

    A GPT-NeoX has no Llama's norm, and its model no dropout here.
    """
    neox = save_model("GPTNeoX", WIDE, tmp_path / "neox")
    (line,) = fails(command(FSDP, 2, neox), tmp_path)
    assert "lm_head.weight is not in the files" in line
    by_rank_0 = IMPORT.replace("load_weights", "load_from_rank_0")
    changes = (LOAD, code_with(by)), (IMPORT, by_rank_0 + IMPORT)
    script = changed(FSDP, tmp_path, *changes)
    screen, weights = train(script, neox, 2, tmp_path)
    expected_screen, expected = train(BEFORE, neox, 1, tmp_path / "before")
    assert screen == expected_screen
    assert "embed_out.weight" in weights  # both write the names of the download
    assert max_abs_diff(weights, expected) <= 1e-10


# ---- lora.py -------------------------------------------------------------------------
@pytest.mark.parametrize(
    "processes, flags",
    [
        (2, ("--peft",)),
        only_in_release(2, ()),
        only_in_release(3, ()),
        only_in_release(3, ("--peft",)),
    ],
)
def test_adapters_are_equal_on_any_number_of_processes(processes, flags, trained):
    """Those that peft makes, too, to ours on one process."""
    _, expected_screen, expected = trained(LORA)
    _, screen, weights = trained(LORA, "llama", processes, *flags, SAVE)
    assert {weight.dtype for weight in weights.values()} == {torch.float64}
    weights = {n.removeprefix("base_model.model."): w for n, w in weights.items()}
    assert max_abs_diff(weights, expected) <= 1e-10
    assert screen == expected_screen
    first, last = losses(screen)
    assert last < first


@pytest.mark.parametrize(
    "kind, flags",
    [
        ("llama", ("--peft",)),
        ("llama-tied", ()),  # its embedding, frozen, has two names
        only_in_release("llama-tied", ("--peft",)),
    ],
)
def test_only_adapters_are_saved_and_reduced(kind, flags, trained):
    """Four blocks have two adapters each, of two matrices; checkpoints, too."""
    folder, _, weights = trained(LORA, kind, 2, *flags, SAVE)
    names = [[*weights]]
    for path in (folder / "work/checkpoints").iterdir():
        state = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        names.append([name for name in state if name.startswith("model.")])
    assert len(names) == 3  # what was saved last, and a checkpoint per epoch
    for each in names:
        assert len(each) == 4 * 2 * 2
        assert all(re.search(r"\.lora_[AB](\.default)?\.weight$", n) for n in each)
    trained = sum(weight.nbytes for weight in weights.values())
    seen = torch.load(folder / "rank-1.pt")
    # The blocks' groups alone have something to reduce: not embedding, head and root.
    assert seen["reduce_scatter"] == {"calls": 4, "bytes": trained}
    read = load_file(pretrained(kind) / "model.safetensors")
    assert trained < 0.1 * sum(8 * weight.numel() for weight in read.values())


def load_with_peft(_, adapters):
    """Return the model that peft loads: in bfloat16, with adapters in float32."""
    model = AutoPeftModelForCausalLM.from_pretrained(adapters)
    assert model.get_base_model().dtype == torch.bfloat16
    weights = load_file(adapters / "adapter_model.safetensors")
    for name, weight in model.named_parameters():
        if "lora_" in name:
            assert weight.equal(weights[name.replace(".default", "")])
    return model


def load_by_the_page(model, adapters):
    """Return the model that the page's lines make."""
    lines = code_with("adapters.safetensors").replace("FOLDER", str(model))
    names = {"__name__": "page"}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPTS)
        exec(lines.replace('"adapters/', f'"{adapters}/'), names)
    return names["model"]


@pytest.mark.parametrize(
    "flags, load", [(("--peft",), load_with_peft), ((), load_by_the_page)]
)
def test_saved_adapters_are_loaded(flags, load, tmp_path):
    """They generate what the script printed."""
    words = command(LORA, 2, pretrained("llama"), "--epochs=1", *flags)
    screen = run(words, tmp_path).stdout
    assert {weight.dtype for weight in saved(tmp_path).values()} == {torch.float32}
    model = load(pretrained("llama"), tmp_path / "work/adapters")
    assert f"generated: {generate(model)}" in screen


@pytest.mark.parametrize("flags", [only_in_release(()), ("--peft",)])
def test_adapters_of_a_model_in_float64_are_in_float64(flags, tmp_path):
    """Also if torch's default is float32, in which peft makes them."""
    flags = ("--dtype=float64", "--epochs=1", *flags)
    run(command(LORA, 1, pretrained("llama"), *flags), tmp_path)
    assert {weight.dtype for weight in saved(tmp_path).values()} == {torch.float64}


def test_a_trained_weight_that_is_no_adapter_is_refused(tmp_path):
    """Otherwise it would begin as zero, without a message."""
    of_peft = 'task_type="CAUSAL_LM"'
    head = (of_peft, f'{of_peft}, modules_to_save=["lm_head"]')
    words = command(changed(LORA, tmp_path, head), 1, pretrained("llama"), "--peft")
    *_, line = run(words, tmp_path, code=2).stderr.splitlines()  # peft warns above it
    assert "lm_head" in line and "is to be trained, but is not an adapter" in line


@pytest.mark.parametrize(
    "flag, package", [("--peft", "peft"), ("--load-in-4bit", "bitsandbytes")]
)
def test_a_package_that_is_not_installed(flag, package, tmp_path):
    words = command(LORA, 1, pretrained("llama"), flag)
    without = functools.partial(spy.without_module, package)
    *_, said = run(words, tmp_path, prepare=without, code=2).stderr.splitlines()
    assert re.search(f"{flag} needs .*: pip install {package}$", said)


# ---- lora.py in 4 bits ---------------------------------------------------------------
has_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None,
    reason="bitsandbytes is not installed",
)
FOUR_BITS = ("--load-in-4bit", "--epochs=2")


def count_frozen(folder):
    """Save the bytes of this rank's linear layers to folder/rank-R.pt: {name: number}.

    It counts in generate(), with which the script ends.
    """

    def count(_, model, *__):
        bits = [
            weight.to_local().nbytes
            for name, weight in model.named_parameters()
            if "proj" in name and "lora_" not in name
        ]
        states = [getattr(each, "quant_state", None) for each in model.modules()]
        scales = [state.absmax.nbytes for state in states if state]
        numbers = {"bits": sum(bits), "scales": sum(scales)}
        torch.save(numbers, Path(folder, f"rank-{dist.get_rank()}.pt"))

    spy.call_after(transformers.GenerationMixin, "generate", count)


@has_bitsandbytes
def test_4_bits_are_sharded_and_train_the_same_adapters(tmp_path):
    """On 2 processes by peft, and on 1 process ours; the page has the bytes."""
    section = PAGE.partition("QLoRA\n")[2]
    screens, weights = [], []
    for processes, flags in ((1, ()), (2, ("--peft",))):
        folder = tmp_path / str(processes)
        words = command(LORA, processes, pretrained("llama"), *FOUR_BITS, *flags)
        prepare = functools.partial(count_frozen, folder)
        done = run([*words, "--dtype=float32"], folder, prepare=prepare)
        screens.append(done.stdout.splitlines()[:2])
        found = saved(folder).items()
        weights.append({n.removeprefix("base_model.model."): w for n, w in found})
        for rank in range(processes):
            seen = torch.load(folder / f"rank-{rank}.pt")
            assert seen == {"bits": 147_456 // 2 // processes, "scales": 147_456 // 64}
            assert all(f"{number:,} bytes" in section for number in seen.values())
    assert max_abs_diff(*weights) <= 1e-5
    for lines in zip(*screens, strict=True):
        first, second = (losses(line) for line in lines)
        assert first == second


@has_bitsandbytes
def test_adapters_of_4_bits_are_loaded_and_merged_by_the_page(tmp_path):
    """They generate what the script printed; merged into 4 bits, they are not equal."""
    words = command(LORA, 1, pretrained("llama"), *FOUR_BITS, "--peft")
    screen = run(words, tmp_path).stdout

    names = {"__name__": "page"}

    def logits(code):
        """Run code; return the logits of the prompt, by the model that it leaves."""
        code = code.replace("FOLDER", str(pretrained("llama")))
        code = code.replace('"adapters"', repr(str(tmp_path / "work/adapters")))
        with pytest.MonkeyPatch.context() as patch, torch.no_grad():
            patch.syspath_prepend(SCRIPTS)
            exec(code, names)
            return names["model"].eval()(input_ids=PROMPT).logits.float()

    trained = logits(code_with("import load_in_4bit"))
    assert f"generated: {generate(names['model'])}" in screen
    again = logits("model = model.merge_and_unload()")
    merged = logits(code_with(".dequantize()"))
    assert {weight.dtype for weight in names["model"].parameters()} == {torch.bfloat16}
    other = logits(
        "from transformers import AutoModelForCausalLM\n"
        'model = AutoModelForCausalLM.from_pretrained("FOLDER")\n'
        'model = PeftModel.from_pretrained(model, "adapters")'
    )
    differences = [(each - trained).abs().max() for each in (merged, again, other)]
    assert differences[0] < 0.02 < min(differences[1:])


@has_bitsandbytes
@pytest.mark.release
def test_a_run_in_4_bits_is_resumed(tmp_path):
    """It prints what a run prints that was not interrupted."""
    words = command(LORA, 2, pretrained("llama"), *FOUR_BITS)
    whole = run(words, tmp_path / "whole").stdout.splitlines()
    run([*words, SAVE, "--epochs=1"], tmp_path)
    assert run([*words, SAVE], tmp_path).stdout.splitlines()[1:] == whole[1:]


STORAGE = "bnb_4bit_quant_storage="
CONVERTED = "RuntimeError: shape '[64, 32]' is invalid for input of size 1024"
REORDERED = "'Tensor' object has no attribute 'full_tensor'"


@has_bitsandbytes
@pytest.mark.release
@pytest.mark.parametrize(
    "before, after, error",
    [
        (f"{STORAGE}dtype", f"{STORAGE}torch.float32", CONVERTED),
        ("for layer in model.modules():", "for layer in ():", REORDERED),
    ],
)
def test_4_bits_that_are_spoiled(before, after, error, tmp_path):
    """By FSDP's policy; and by an evaluation on a CPU with AVX512-BF16."""
    if error == REORDERED and "avx512_bf16" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("the CPU has no AVX512-BF16")
    script = changed(LORA, tmp_path, (before, after))
    words = command(script, 2, pretrained("llama"), *FOUR_BITS)
    assert error in run(words, tmp_path, code=1).stderr
    assert error in PAGE


# ---- bad input -----------------------------------------------------------------------
def fails(words, folder):
    """Return the lines that each rank prints, once; the exit code must be 2."""
    done = run(words, folder, code=2)
    assert "Traceback" not in done.stderr
    assert not (folder / "work/adapters").exists()
    return {line for each in done.ranks for line in own_lines(each.stderr)}


def edit_config(folder, **changes):
    """Change entries of a folder's config.json; None removes one."""
    config = json.loads((folder / "config.json").read_text()) | changes
    kept = {name: value for name, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))


def spoil(what, llama, folder):
    """Make a folder that is no model that the scripts take, of a Llama's."""
    if what == "whisper":
        size = {"d_model": 32, "vocab_size": 64, "encoder_ffn_dim": 64}
        size |= {"decoder_ffn_dim": 64, "encoder_layers": 1, "decoder_layers": 1}
        size |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
        size |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        config = transformers.WhisperConfig(decoder_start_token_id=1, **size)
        transformers.WhisperForConditionalGeneration(config).save_pretrained(folder)
    elif what == "t5":
        t5().save_pretrained(folder)
    elif what in ("no file of several", "no index"):
        model = AutoModelForCausalLM.from_pretrained(llama)
        model.save_pretrained(folder, max_shard_size="100KB")
        min(folder.glob("*.safetensors")).unlink()
        if what == "no index":
            (folder / "model.safetensors.index.json").unlink()
    elif what in ("base model", "no head"):
        AutoModel.from_pretrained(llama).save_pretrained(folder)
        if what == "no head":
            edit_config(folder, architectures=["LlamaForCausalLM"])
    else:
        folder.mkdir()
        if what != "no weights":
            save_file({"weight": torch.zeros(1)}, folder / "model.safetensors")
        if what == "nonesuch":
            shutil.copy(llama / "config.json", folder)
            edit_config(folder, model_type="nonesuch")


PARTS = r"model-00001-of-\d+.safetensors is not in \S+: is the download complete\?"


@pytest.mark.parametrize(
    "what, line, scripts",
    [
        ("no weights", r"there is no \*.safetensors in \S+", [BEFORE, FSDP, LORA]),
        ("no config", "there is no config.json in .*", [BEFORE, FSDP]),
        ("no file of several", PARTS, [BEFORE, FSDP]),
        ("no index", ".* is not in the files of .* the download complete.*", [FSDP]),
        ("no head", "lm_head.weight is not in the files of .*", [FSDP, LORA]),
        ("base model", "config.json is of a LlamaModel, not of a Llama.*", [FSDP]),
        ("whisper", ".* not of a WhisperForCausalLM: name its class .*", [FSDP]),
        ("t5", "Unrecognized configuration class.{,160}", [FSDP]),
        ("nonesuch", ".* has model type `nonesuch` but .*", [FSDP, LORA]),
        ("gpt2", "no linear layer is named q_proj or v_proj: --targets", [LORA]),
        ("llama --batch-size=9", ".* must be divisible by --micro-batches", [BEFORE]),
        ("llama --batch-size=10", r".* must be divisible by .* \(4\)", [FSDP]),
        ("llama --batch-size=512", ".* more than the 505 .*", [BEFORE, FSDP]),
        ("llama --peft --targets nonesuch", ".*nonesuch.*", [LORA]),
        ("llama --load-in-4bit --dtype=float64", "--load-in-4bit goes with.*", [LORA]),
    ],
)
def test_bad_input_gets_one_line(what, line, scripts, tmp_path):
    """On each of two ranks, none of which waits for the other."""
    kind, *flags = what.split()
    if kind in ("llama", "gpt2"):
        folder = pretrained(kind)
    else:
        folder, flags = tmp_path / "model", ()
        spoil(what, pretrained("llama"), folder)
    for script in scripts:
        (said,) = fails(command(script, 2, folder, *flags), tmp_path)
        pattern = f"{script.name}: error: (argument model: )?{line}"
        assert re.fullmatch(pattern, said), said


@pytest.mark.parametrize("script", [FSDP, LORA], ids=lambda path: path.name)
def test_plain_python_names_torchrun(script, tmp_path):
    (line,) = fails(["python", script, pretrained("llama")], tmp_path)
    assert "torchrun --standalone --nproc-per-node" in line


def test_a_rank_without_a_sample_to_evaluate(tmp_path):
    """Otherwise it has an IndexError, and the other ranks wait for it."""
    script = changed(FSDP, tmp_path, ("make_dataset(97,", "make_dataset(1,"))
    (line,) = fails(command(script, 2, pretrained("llama")), tmp_path)
    assert line.endswith("1 samples for 2 processes to evaluate")


def test_an_error_of_transformers_keeps_its_traceback(tmp_path):
    """Only what sharded.py says itself is one line: another ValueError may be a bug."""
    other = shutil.copytree(pretrained("llama"), tmp_path / "other")
    edit_config(other, attn_implementation="nonesuch")
    done = run(command(FSDP, 1, other), tmp_path, code=1)
    assert done.stderr.startswith("[rank0]: Traceback")
    assert "\n[rank0]: ValueError: " in done.stderr


# ---- the page ------------------------------------------------------------------------
COMMANDS = re.findall(r"^\$ ((?:python|torchrun) .*)$", PAGE, re.MULTILINE)
# The reader's own model is in FOLDER.
COMMANDS = [each for each in COMMANDS if "FOLDER" not in each]
if not importlib.util.find_spec("bitsandbytes"):
    COMMANDS = [each for each in COMMANDS if "--load-in-4bit" not in each]


def test_the_page_has_the_section_that_an_error_names():
    text = re.sub(r'"\n\s+"', "", SHARDED.read_text())
    (section,) = re.findall(r'see README.md, (.*?)"', text)
    assert f"### {section}".lower() in PAGE.lower().splitlines()


@pytest.mark.release
def test_the_check_of_the_page(tmp_path):
    """A small model of FOLDER trains the same weights, and loads as from_pretrained."""
    copy = shutil.copytree(SCRIPTS.parent, tmp_path / "copy") / SCRIPTS.name
    block = r"^   \$ ((?:python|torchrun) .*\bsmall\b.*)$"
    make, check, compare = re.findall(block, PAGE, re.MULTILINE)
    made = make.replace("FOLDER", str(pretrained("llama")))
    commands.run(made, tmp_path / "made", cwd=copy)
    done = commands.run(check, tmp_path / "checked", cwd=copy)
    number = r"\d\.\de-\d+, in \S+"
    lines = [re.sub(number, "", line) for line in done.stdout.splitlines()]
    page = [re.sub(number, "", line.strip()) for line in PAGE.splitlines()]
    shown = page[page.index(f"$ {check}") + 1 :][:4]
    assert lines[:4] == shown and shown[3] == "equal except for rounding"
    shown = page[page.index(f"$ {compare}") + 1]
    done = commands.run(compare, tmp_path / "compared", cwd=copy)
    assert done.stdout.splitlines() == [shown]


def test_a_buffer_that_was_not_computed_is_named(tmp_path):
    """And the loss that it spoils; without an error."""
    script = changed(SHARDED, tmp_path, ("    model.initialize_weights()\n", ""))
    program = script.with_name("check_loading.py")
    prepare = functools.partial(torch.use_deterministic_algorithms, True)  # to nan
    words = ["python", program, pretrained("llama")]
    done = run(words, tmp_path, prepare=prepare, code=1)
    first, second = done.stdout.splitlines()
    assert first.startswith("buffers with other values: model.rotary_emb.inv_freq")
    assert second.startswith("loss nan, with from_pretrained ")


SHRUNK = ["Qwen3", "Gemma2", "Mixtral", "GPTNeoX", "Falcon", "Mamba2", "Jamba"]
SHRUNK += ["FalconH1", "Qwen3Next", "DeepseekV3"]


@pytest.mark.parametrize("kind", SHRUNK)
def test_a_small_model_of_a_folder(kind, tmp_path):
    """Of the same class, with few weights, for tokens that the toy data have."""
    large = getattr(transformers, f"{kind}Config")()
    large.save_pretrained(tmp_path)
    program = runpy.run_path(SCRIPTS / "make_model.py")
    config = program["shrink"](tmp_path)
    config.architectures = [f"{kind}ForCausalLM"]  # as a download has it
    model = program["find_class"](config)(config)
    assert type(model).__name__ == f"{kind}ForCausalLM"
    assert model.num_parameters() < 1e7
    assert model(PROMPT).logits.shape == (*PROMPT.shape, 256)


@pytest.mark.parametrize(
    "entries, line",
    [
        ({"model_type": "nonesuch"}, ".* has model type `nonesuch` but .*"),
        ({"architectures": ["Nonesuch"]}, "config.json names Nonesuch as the .*"),
    ],
)
def test_no_small_model_of_an_unknown_kind(entries, line, tmp_path):
    shutil.copy(pretrained("llama") / "config.json", tmp_path)
    edit_config(tmp_path, **entries)
    words = ["python", SCRIPTS / "make_model.py", tmp_path, "--out", "small"]
    done = run(words, tmp_path, code=2)
    assert re.fullmatch(f"make_model.py: error: {line}", done.stderr.splitlines()[-1])


@pytest.mark.release
def test_the_commands_of_the_page_run_in_turn(tmp_path):
    """As they are typed, by the launcher; the loss falls in each that trains."""
    assert len(COMMANDS) >= 4
    trained = 0
    copy = shutil.copytree(SCRIPTS, tmp_path / "copy")
    no_gpu = {} if torch.cuda.device_count() >= 2 else {"CUDA_VISIBLE_DEVICES": ""}
    for each in COMMANDS:
        place = tmp_path / "screens" / str(trained)
        done = commands.run(each, place, cwd=copy, **no_gpu)
        if found := losses(done.stdout):
            assert found[-1] < found[0]
            trained += 1
    assert trained >= 3


TEMPLATE = """<begin> {% for each in messages %}
{{ each.role }} {{ each.content }} <end> {% endfor %}
{% if add_generation_prompt %} assistant {% endif %}"""


def save_tokenizer(folder):
    """Save a tokenizer of words, which begins each text with a token, as a Llama's."""
    words = ["<end>", "<begin>", *map(str, range(100)), "user", "assistant"]
    tokenizer = Tokenizer(WordLevel({word: n for n, word in enumerate(words)}))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(
        single="<begin> $A", special_tokens=[("<begin>", 1)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<begin>",
        eos_token="<end>",
        chat_template=TEMPLATE,
    ).save_pretrained(folder)


def with_data_of_the_page(folder, data, said):
    """Copy the scripts, and change fsdp.py as the page does.

    data, said: texts of the page's make_dataset and of its prompt.
    """
    text = FSDP.read_text()
    prompt = code_with(said).replace(said, "5 8 11 14")
    model = "from transformers import AutoModelForCausalLM\n"
    changes = functions_with(data)
    changes += [(model, model + model.replace("ModelForCausalLM", "Tokenizer"))]
    for start, code in (
        ("    train_set, val_set = ", code_with("train.jsonl")),
        ("    prompt = ", prompt),
        ('    return " ".join', code_with("tokenizer.decode")),
    ):
        (line,) = re.findall(f"^{re.escape(start)}.*\n", text, re.M)
        changes.append((line, code))
    return changed(FSDP, folder, *changes)


def make_lines(kind):
    """Return 96 lines of JSON: texts that count up, or conversations that do."""
    counts = [[*map(str, range(n % 7, 90, 3))][: 8 + n % 20] for n in range(96)]
    if kind == "text":
        return [json.dumps({"text": " ".join(count)}) for count in counts]
    lines = []
    for count in counts:
        parts = count[:4], count[4:]
        roles = zip(("user", "assistant"), parts, strict=True)
        messages = [{"role": role, "content": " ".join(part)} for role, part in roles]
        lines.append(json.dumps({"messages": messages}))
    return lines


@pytest.mark.release
@pytest.mark.parametrize(
    "kind, said", [("text", "Once upon a time"), ("messages", "Who are you?")]
)
def test_the_data_of_the_page(kind, said, tmp_path):
    """fsdp.py and lora.py train on it with the lines of the page, and generate."""
    folder = shutil.copytree(pretrained("llama"), tmp_path / "llama")
    save_tokenizer(folder)
    script = with_data_of_the_page(tmp_path, f'["{kind}"]', said)
    work, lines = tmp_path / "work", make_lines(kind)
    work.mkdir()
    (work / "train.jsonl").write_text("\n".join(lines[:72]))
    (work / "val.jsonl").write_text("\n".join(lines[72:]))
    for each, flags in ((script, ()), (script.with_name("lora.py"), ("--peft",))):
        screen = run(command(each, 2, folder, *flags), tmp_path).stdout
        assert losses(screen)[-1] < losses(screen)[0]
        assert re.search(r"^generated: \S+ ", screen, re.M)


def test_a_text_of_the_page_ends_with_the_end(tmp_path):
    save_tokenizer(tmp_path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    lines = [*make_lines("text"), json.dumps({"text": "7 " * 2000})]
    (tmp_path / "lines.jsonl").write_text("\n".join(lines))
    script = with_data_of_the_page(tmp_path, '["text"]', "Once upon a time")
    found = load_program(script).make_dataset(tmp_path / "lines.jsonl", tokenizer)
    assert all(one[0] == 1 and one[-1] == 0 and len(one) <= 1024 for one in found)
    assert len(found) == 97 and len(found[-1]) == 1024


def test_only_the_last_answer_of_the_page_has_labels(tmp_path):
    """What is too long is left out; a template that changes the prompt is refused."""
    save_tokenizer(tmp_path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    words = ("user", "1 2"), ("assistant", "3"), ("user", "4"), ("assistant", "5 6")
    messages = [{"role": role, "content": content} for role, content in words]
    long = [{"role": "user", "content": "7 " * 1020}, messages[-1]]
    path = tmp_path / "lines.jsonl"
    path.write_text("\n".join(json.dumps({"messages": m}) for m in (messages, long)))
    script = with_data_of_the_page(tmp_path, '["messages"]', "Who are you?")
    program = load_program(script)
    (sample,) = program.make_dataset(path, tokenizer)
    tokens, labels = sample.T
    said = "<begin> user 1 2 <end> assistant 3 <end> user 4 <end> assistant 5 6 <end>"
    assert tokenizer.decode(tokens) == said
    assert labels.tolist() == [-100] * 12 + tokens[12:].tolist()
    assert tokenizer.decode(labels[12:]) == "5 6 <end>"

    ((inputs, labels),) = program.collate([sample[-4:], sample[-3:]])
    assert inputs["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2]]
    five, six, end = sample[-3:, 0].tolist()
    assert labels.tolist() == [[five, six, end, -100, six, end, -100]]

    tokenizer.chat_template = TEMPLATE.replace("assistant {%", "user {%")
    with pytest.raises(ValueError, match="the answer does not continue the prompt"):
        program.make_dataset(path, tokenizer)


# ---- packing, and the loss in chunks -------------------------------------------------
APPEND = "sequences.append((first + step * torch.arange(length)) % 251)"
PAIRS = """tokens = (first + step * torch.arange(length)) % 251
        sequences.append(torch.stack((tokens, tokens), 1))"""


@pytest.mark.release
@pytest.mark.parametrize("name", ["collate", "get_loss_sum"])
def test_functions_of_the_page_train_the_same_weights(name, trained, tmp_path):
    """Packed samples, and a loss in chunks, as padded ones with all logits."""
    changes = [pair for pair in functions_with(f"def {name}") if name in pair[0]]
    changes += [(APPEND, PAIRS)] if name == "collate" else []
    script = changed(FSDP, tmp_path, *changes)
    screen, weights = train(script, pretrained("llama"), 2, tmp_path)
    _, expected_screen, expected = trained(BEFORE)
    assert max_abs_diff(weights, expected) <= 1e-10
    assert screen == expected_screen


PACKED = {name: FAMILIES.get(name, GROUPED) for name in ("Llama", "Mistral", "Phi")}
PACKED |= {name: {**GROUPED, "head_dim": 16} for name in ("Qwen3", "Gemma3Text")}
MIXED = {"OPT": FAMILIES["OPT"], "Bloom": {}, "Mamba": {}}


@pytest.mark.release
@pytest.mark.parametrize("family", [*PACKED, *MIXED])
def test_where_a_packed_sample_begins(family):
    """The families that the page names know it, or do not, without an error."""
    torch.manual_seed(0)
    shape = SMALL | {"pad_token_id": 0} | (PACKED | MIXED)[family]
    config = getattr(transformers, f"{family}Config")(**shape)
    model = AutoModelForCausalLM.from_config(config).eval()
    samples = [torch.randint(1, 250, (1, length)) for length in (9, 13)]
    positions = torch.cat([torch.arange(each.shape[1]) for each in samples])[None]
    with torch.no_grad():
        packed = model(
            input_ids=torch.cat(samples, 1), position_ids=positions, use_cache=False
        ).logits
        alone = [model(input_ids=each, use_cache=False).logits for each in samples]
    off = (packed - torch.cat(alone, 1)).abs().max()
    assert off > 1e-2 if family in MIXED else off < 1e-5


def write_peak(script, folder, path):
    """Write the loss of a program, and the memory of its process at its peak."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.manual_seed(0)
    inputs, labels = torch.randint(0, 32_000, (2, 32, 128))
    args = SimpleNamespace(bf16=False)
    for _ in range(2):
        loss = load_program(script).get_loss_sum(
            args, model, {"input_ids": inputs}, labels, torch.device("cpu")
        )
        (loss / labels.numel()).backward()
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    path.write_text(f"{loss.item()} {most}")


@pytest.mark.release
def test_chunks_take_less_memory(tmp_path):
    """Of a process, with the numbers of the page."""
    flags = ("--vocab-size=32000", "--width=256", "--depth=2")
    run(["python", SCRIPTS / "make_model.py", "llama", *flags], tmp_path)
    script = changed(FSDP, tmp_path, *functions_with("def get_loss_sum"))
    peaks = [tmp_path / name for name in ("whole", "chunks")]
    for path, program in zip(peaks, (FSDP, script), strict=True):
        case = (program, tmp_path / "work/llama", path)
        commands.call_in_forks(write_peak, [case])
    (loss, most), (same, less) = (
        map(float, path.read_text().split()) for path in peaks
    )
    assert loss == pytest.approx(same, rel=1e-5)
    assert less < 0.6 * most
