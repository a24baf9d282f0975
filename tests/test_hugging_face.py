"""your_own_script/hugging_face: FSDP2 trains the weights that one process trains."""

import argparse
import contextlib
import functools
import io
import json
import re
import runpy
import shutil
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from torch import distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import AutoModel
from transformers import AutoModelForCausalLM
from transformers import CLIPVisionConfig
from transformers import FalconConfig
from transformers import GenerationConfig
from transformers import GPTNeoXConfig
from transformers import GraniteConfig
from transformers import LlamaConfig
from transformers import LlavaConfig
from transformers import LlavaForConditionalGeneration
from transformers import MistralConfig
from transformers import OPTConfig
from transformers import PhiConfig
from transformers import PreTrainedTokenizerFast
from transformers import Qwen2Config
from transformers import StableLmConfig
from transformers import Starcoder2Config
from transformers import T5Config
from transformers import T5ForConditionalGeneration
from transformers import ViTConfig
from transformers import ViTForImageClassification
from transformers import WhisperConfig
from transformers import WhisperForConditionalGeneration

from tests import spy
from tests.conftest import only_in_release
from tests.training import TRANSFORMERS
from tests.training import losses
from tools import harness
from tools.stages import ROOT

pytestmark = [pytest.mark.ci, pytest.mark.slow]

harness.preloaded += TRANSFORMERS

FOLDER = ROOT / "your_own_script/hugging_face"
BEFORE, FSDP, LORA = (FOLDER / f"{name}.py" for name in ("before", "fsdp", "lora"))
PAGE = (FOLDER / "README.md").read_text()
KINDS = ("llama", "llama-tied", "gpt2")
DOUBLE = ("--dtype=float64", "--epochs=2", "--batch-size=48")
SAMPLES = 480  # of an epoch, whose last batch is dropped
QUIET = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_OFFLINE": "1"}
PROMPT = torch.tensor([[5, 8, 11, 14, 17, 20, 23, 26]])


each_script = pytest.mark.parametrize(
    "script", [BEFORE, FSDP, only_in_release(LORA)], ids=lambda path: path.name
)


def run(command, folder, **options):
    """Run a script in forks, in the folder `folder`/work; return a harness.Done."""
    work = folder / "work"
    work.mkdir(parents=True, exist_ok=True)
    if torch.cuda.device_count() < 2:
        options["CUDA_VISIBLE_DEVICES"] = ""
    return harness.run(command, folder, forks=True, cwd=work, **QUIET, **options)


def launch(processes, script, *flags):
    """Return the words of torchrun's command."""
    return ["torchrun", "--standalone", f"--nproc-per-node={processes}", script, *flags]


def train(script, model, processes, folder, *flags):
    """Train for two epochs in float64; return the screen and the saved weights."""
    flags = (model, *DOUBLE, *flags)
    prepare = functools.partial(spy.exact_norm, folder)
    done = run(launch(processes, script, *flags), folder, prepare=prepare)
    return done.stdout, saved(folder)


def saved(folder):
    """Return the weights that a script has written."""
    (path,) = (folder / "work").glob("*/*.safetensors")  # in tuned, or in adapters
    return load_file(path)


def max_abs_diff(one, other):
    """Return the largest difference of two models' weights, which have equal names."""
    assert one.keys() == other.keys()
    return max(
        (one[name].double() - other[name].double()).abs().max().item() for name in one
    )


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """Return a function that gives the folder of a model of this kind."""
    made = {}

    def get(kind):
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            run(["python", FOLDER / "make_model.py", kind], folder)
            made[kind] = folder / "work" / kind
        return made[kind]

    return get


@pytest.fixture(scope="module")
def before(pretrained, tmp_path_factory):
    """Return a function that trains by before.py in the order of fsdp.py's samples."""
    trained = {}

    def get(kind):
        if kind not in trained:
            folder = tmp_path_factory.mktemp(f"before-{kind}")
            command = ["python", BEFORE, pretrained(kind), *DOUBLE]
            prepare = functools.partial(spy.exact_norm_and_shuffle, SAMPLES)
            done = run(command, folder, prepare=prepare)
            trained[kind] = done.stdout, saved(folder)
        return trained[kind]

    return get


# ---- fsdp.py -------------------------------------------------------------------------
@pytest.mark.parametrize(
    "kind, processes",
    [
        only_in_release(kind, n, unless=n == 2 and kind == "llama")
        for kind in KINDS
        for n in (1, 2, 3)
    ],
)
def test_fsdp_trains_the_weights_of_before(
    kind, processes, pretrained, before, tmp_path
):
    """On two processes, one has a batch more to evaluate; on all, the screen is equal.

    Llama's norm computes in float64 here, see spy.exact_norm.
    """
    screen, weights = train(FSDP, pretrained(kind), processes, tmp_path)
    expected_screen, expected = before(kind)
    assert max_abs_diff(weights, expected) <= 1e-10
    assert screen == expected_screen
    first, last = losses(screen)
    assert last < 0.8 * first
    # what was trained is not what was read
    read = load_file(pretrained(kind) / "model.safetensors")
    assert max_abs_diff(weights, read) > 1e-3


def other_config(kind):
    """Return the configuration of a small model that make_model.py does not make."""
    shape = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    shape |= {"vocab_size": 256, "bos_token_id": 0, "eos_token_id": 0}
    if kind == "falcon":
        return FalconConfig(ffn_hidden_size=128, **shape)
    shape["max_position_embeddings"] = 128
    if kind == "opt":
        return OPTConfig(ffn_dim=128, word_embed_proj_dim=64, dropout=0.0, **shape)
    shape["intermediate_size"] = 128
    if kind == "phi":
        return PhiConfig(**shape)
    shape["num_key_value_heads"] = 2
    return {
        "granite": GraniteConfig,
        "mistral": MistralConfig,
        "qwen2": Qwen2Config,
        "stablelm": StableLmConfig,
        "starcoder2": Starcoder2Config,
    }[kind](**shape)


FAMILIES = ("falcon", "granite", "mistral", "opt")
FAMILIES += ("phi", "qwen2", "stablelm", "starcoder2")


@pytest.mark.release
@pytest.mark.parametrize("kind", FAMILIES)
def test_other_families_are_trained_without_a_change(kind, tmp_path):
    """To 1e-4 only: most norms compute in float32, whose rounding AdamW enlarges."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(other_config(kind))
    model.to(torch.bfloat16).save_pretrained(tmp_path / kind)
    command = ["python", BEFORE, tmp_path / kind, *DOUBLE]
    prepare = functools.partial(spy.exact_norm_and_shuffle, SAMPLES)
    expected_screen = run(command, tmp_path / "before", prepare=prepare).stdout
    screen, weights = train(FSDP, tmp_path / kind, 2, tmp_path)
    assert max_abs_diff(weights, saved(tmp_path / "before")) <= 1e-4
    assert screen == expected_screen
    first, last = losses(screen)
    assert last < 0.8 * first


@pytest.mark.parametrize("kind", ["llama", *map(only_in_release, KINDS[1:])])
def test_the_saved_folder_is_a_model_for_transformers(kind, pretrained, tmp_path):
    """from_pretrained loads it, all of it, and it generates what the script printed."""
    read = shutil.copytree(pretrained(kind), tmp_path / "read")
    GenerationConfig(eos_token_id=[250, 251]).save_pretrained(read)
    screen = run(launch(2, FSDP, read, "--epochs=1"), tmp_path).stdout
    folder = tmp_path / "work/tuned"
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert model.dtype == torch.float32
    # otherwise a chat model forgets where to stop
    assert model.generation_config.eos_token_id == [250, 251]
    weights = saved(tmp_path)
    assert weights.keys() == dict(model.named_parameters()).keys()  # tied: once
    text = model.generate(PROMPT, max_new_tokens=6, do_sample=False)[0, 8:]
    assert f"generated: {' '.join(map(str, text.tolist()))}" in screen


def test_a_rank_never_holds_the_whole_model(pretrained, tmp_path):
    """The collectives of a step: one group per block, the embedding, head and root."""
    train(FSDP, pretrained("llama"), 2, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(pretrained("llama"))
    whole = 8 * model.num_parameters()
    for rank in range(2):
        seen = torch.load(tmp_path / f"rank-{rank}.pt")
        # Each of two micro-batches: 4 blocks, embedding, head and root in forward; the
        # blocks and the embedding again in backward.
        assert seen["all_gather"]["calls"] == 2 * (7 + 5)
        # Once per step: the first micro-batch keeps its gradients.
        assert seen["reduce_scatter"] == {"calls": 7, "bytes": whole}


def test_a_run_is_resumed_on_another_number_of_processes(pretrained, before, tmp_path):
    flags = ("--checkpoint-dir=checkpoints",)
    first, _ = train(FSDP, pretrained("llama"), 2, tmp_path, *flags, "--epochs=1")
    assert len(losses(first)) == 1
    second, weights = train(FSDP, pretrained("llama"), 3, tmp_path, *flags)
    resumed, *rest = second.splitlines()
    assert re.fullmatch(r"resumed from checkpoints.epoch-0001", resumed)
    screen, expected = before("llama")
    assert [first.splitlines()[0], *rest] == screen.splitlines()
    assert max_abs_diff(weights, expected) <= 1e-10


@pytest.mark.release
def test_before_resumes(pretrained, tmp_path):
    flags = [pretrained("llama"), "--dtype=float64", "--checkpoint-dir=checkpoints"]
    prepare = spy.exact_norm
    first = run(["python", BEFORE, *flags, "--epochs=1"], tmp_path, prepare=prepare)
    second = run(["python", BEFORE, *flags, "--epochs=2"], tmp_path, prepare=prepare)
    assert len(losses(first.stdout)) == 1
    assert "resumed from checkpoints" in second.stdout
    (loss,) = losses(second.stdout)
    assert loss < losses(first.stdout)[0]


@pytest.mark.release
def test_activation_checkpointing_changes_nothing(pretrained, before, tmp_path):
    flag = "--activation-checkpointing"
    _, weights = train(FSDP, pretrained("llama"), 2, tmp_path, flag)
    _, expected = before("llama")
    assert max_abs_diff(weights, expected) <= 1e-10


@pytest.mark.release
def test_bf16_keeps_weights_in_float32(pretrained, before, tmp_path):
    flags = (pretrained("llama"), "--bf16", *DOUBLE[1:])
    screen = run(launch(2, FSDP, *flags), tmp_path).stdout
    exact = losses(before("llama")[0])
    assert losses(screen) == pytest.approx(exact, rel=0.02)
    assert {weight.dtype for weight in saved(tmp_path).values()} == {torch.float32}


@each_script
def test_a_resumed_run_has_the_learning_rate_that_is_asked_for(
    script, pretrained, tmp_path
):
    """Not that of the checkpoint: with next to none, the weights stay as they are."""
    words = launch(2, script) if script != BEFORE else ["python", script]
    words += [pretrained("llama"), "--checkpoint-dir=checkpoints"]
    run([*words, "--epochs=1"], tmp_path)
    first = saved(tmp_path)
    done = run([*words, "--epochs=2", "--lr=1e-12"], tmp_path)
    assert "resumed from" in done.stdout
    assert max_abs_diff(saved(tmp_path), first) < 1e-6


@pytest.mark.release
def test_files_of_a_base_model(pretrained, before, tmp_path):
    """The names of the GPT-2 that one downloads are without "transformer."."""
    base = tmp_path / "base"
    AutoModel.from_pretrained(pretrained("gpt2")).save_pretrained(base)
    assert "wte.weight" in load_file(base / "model.safetensors")
    config = json.loads((base / "config.json").read_text())
    del config["architectures"]
    (base / "config.json").write_text(json.dumps(config))
    screen, weights = train(FSDP, base, 2, tmp_path)
    assert screen == before("gpt2")[0]
    assert max_abs_diff(weights, before("gpt2")[1]) <= 1e-10


def note_rows(folder):
    """Have embeddings write how many sequences they get at a time, to a file a mode."""

    def note(module, inputs):
        if isinstance(module, nn.Embedding):
            mode = "training" if module.training else "evaluation"
            with Path(folder, mode).open("a") as file:
                print(len(inputs[0]), file=file)

    register_module_forward_pre_hook(note)


@pytest.mark.release
@each_script
def test_evaluation_takes_a_micro_batch_at_a_time(script, pretrained, tmp_path):
    """Otherwise it needs more memory than training, and fails after an epoch of it."""
    flags = (pretrained("llama"), "--epochs=1", "--batch-size=24", "--micro-batches=3")
    words = launch(2, script) if script != BEFORE else ["python", script]
    run([*words, *flags], tmp_path, prepare=functools.partial(note_rows, tmp_path))
    rows = {
        mode: max(map(int, (tmp_path / mode).read_text().split()))
        for mode in ("training", "evaluation")
    }
    processes = 1 if script == BEFORE else 2
    assert rows == dict.fromkeys(rows, 24 // processes // 3)


def fail_in_evaluation():
    """Have the first forward pass of an evaluation raise an error."""

    def fail(module, _):
        if not module.training:
            raise RuntimeError("evaluation fails")

    register_module_forward_pre_hook(fail)


@pytest.mark.parametrize(
    "script", [only_in_release(BEFORE), FSDP], ids=lambda path: path.name
)
def test_an_evaluation_that_fails_loses_no_epoch(script, pretrained, tmp_path):
    words = launch(2, script) if script != BEFORE else ["python", script]
    words += [pretrained("llama"), "--checkpoint-dir=checkpoints", "--epochs=1"]
    done = run(words, tmp_path, prepare=fail_in_evaluation, code=1)
    assert "evaluation fails" in done.stderr
    (saved,) = (tmp_path / "work/checkpoints").iterdir()
    assert saved.name in ("checkpoint.pt", "epoch-0001")


def shard_a_model_for_images():
    """Be a process in which shard_model finds the blocks behind a vision tower's."""
    small = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    vision = CLIPVisionConfig(num_hidden_layers=2, patch_size=8, **small)
    text = LlamaConfig(num_hidden_layers=3, vocab_size=64, **small)
    config = LlavaConfig(vision_config=vision, text_config=text)
    with torch.device("meta"):
        model = LlavaForConditionalGeneration(config)
    lists = {
        name: len(module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
    }
    assert list(lists.values()) == [2, 3]  # the vision tower's is the first
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    mesh = dist.init_device_mesh("cpu", (1,))
    shard_model = runpy.run_path(FSDP)["shard_model"]
    shard_model(model, mesh, bf16=False)
    groups = [name for name, m in model.named_modules() if isinstance(m, FSDPModule)]
    blocks = [f"model.language_model.layers.{n}" for n in range(3)]
    assert groups == ["", "model.language_model.embed_tokens", *blocks, "lm_head"]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(text)
    model.config.num_hidden_layers = 5
    with pytest.raises(argparse.ArgumentTypeError, match="no list of 5 blocks"):
        shard_model(model, mesh, bf16=False)
    dist.destroy_process_group()


def shard_a_model_with_two_lists_of_blocks():
    """Be a process in which shard_model finds the blocks of an encoder alone."""
    config = T5Config(vocab_size=8, d_model=32, d_kv=16, d_ff=64, num_layers=2)
    with torch.device("meta"):
        model = T5ForConditionalGeneration(config)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    mesh = dist.init_device_mesh("cpu", (1,))
    with contextlib.redirect_stderr(io.StringIO()) as said:
        runpy.run_path(FSDP)["shard_model"](model, mesh, bf16=False)
    assert re.match(r"[\d,]+ of [\d,]+ parameters are in no block", said.getvalue())
    groups = [name for name, m in model.named_modules() if isinstance(m, FSDPModule)]
    assert groups == ["", "encoder.block.0", "encoder.block.1"]
    dist.destroy_process_group()


def shard_a_model_without_embeddings():
    """Be a process in which shard_model gets a classifier of images."""
    config = ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
    with torch.device("meta"):
        model = ViTForImageClassification(config)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    mesh = dist.init_device_mesh("cpu", (1,))
    runpy.run_path(FSDP)["shard_model"](model, mesh, bf16=False)
    assert sum(isinstance(module, FSDPModule) for module in model.modules()) == 3
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "function",
    [shard_a_model_with_two_lists_of_blocks, shard_a_model_without_embeddings],
)
def test_models_of_other_kinds_are_sharded(function):
    """With a line about what stays whole, if that is much."""
    harness.call_in_forks(function, [()])


def test_blocks_are_found_by_their_number():
    harness.call_in_forks(shard_a_model_for_images, [()])


def test_prompts_are_attended_to_without_being_learned():
    """A label of -100 in the prompt must not hide the prompt from attention."""
    collate = runpy.run_path(BEFORE)["collate"]
    ((inputs, labels),) = collate([torch.arange(5, 9), torch.arange(5, 7)])
    assert inputs["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert labels.tolist() == [[6, 7, 8, -100], [6, -100, -100, -100]]


@pytest.mark.release
def test_rank_0_reads_files_of_other_names(tmp_path):
    """By the lines of the page, for a GPT-NeoX: fsdp.py itself does not find its head.

    A GPT-NeoX has no Llama's norm, and its model no dropout here.
    """
    tokens = {"vocab_size": 256, "bos_token_id": 0, "eos_token_id": 0}
    config = GPTNeoXConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=128,
        **tokens,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "neox")
    line = fails(launch(2, FSDP, tmp_path / "neox"), tmp_path)
    assert "lm_head.weight is not in the files" in line
    code = re.findall(r"^```python\n(.*?)```", PAGE, re.DOTALL | re.MULTILINE)
    (lines,) = [block for block in code if "broadcast_from_rank0" in block]
    text = FSDP.read_text()
    first = text.index("    reader = ")
    rest = text.index("    return model\n", first)
    text = text[:first] + lines + text[rest:]
    name = "from torch.distributed.checkpoint.state_dict import set_{}state_dict\n"
    text = text.replace(name.format(""), name.format("") + name.format("model_"))
    script = tmp_path / "fsdp.py"
    script.write_text(text)
    screen, weights = train(script, tmp_path / "neox", 2, tmp_path)
    again, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "work/tuned", dtype=torch.float64, output_loading_info=True
    )
    assert not info["missing_keys"] and max_abs_diff(weights, again.state_dict()) == 0
    command = ["python", BEFORE, tmp_path / "neox", *DOUBLE]
    prepare = functools.partial(spy.exact_norm_and_shuffle, SAMPLES)
    expected = run(command, tmp_path / "before", prepare=prepare).stdout
    assert screen == expected
    # by the model's names: before.py's file has the old ones again
    model, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "before/work/tuned", dtype=torch.float64, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert max_abs_diff(weights, model.state_dict()) <= 1e-10


# ---- lora.py -------------------------------------------------------------------------
@pytest.fixture(scope="module")
def adapted(pretrained, tmp_path_factory):
    """Return a function that trains adapters; it returns the folder, too."""
    trained = {}

    def get(processes, *flags, kind="llama"):
        key = (processes, *flags, kind)
        if key not in trained:
            folder = tmp_path_factory.mktemp(f"lora-{processes}")
            flags = (*flags, "--checkpoint-dir=checkpoints")
            parts = (LORA, pretrained(kind), processes, folder, *flags)
            trained[key] = folder, *train(*parts)
        return trained[key]

    return get


@pytest.mark.parametrize("processes", [2, only_in_release(3)])
@pytest.mark.parametrize(
    "flags", [only_in_release(()), ("--peft",)], ids=["own", "peft"]
)
def test_adapters_are_equal_on_any_number_of_processes(processes, flags, adapted):
    _, expected_screen, expected = adapted(1, *flags)
    _, screen, weights = adapted(processes, *flags)
    assert {weight.dtype for weight in weights.values()} == {torch.float64}
    assert max_abs_diff(weights, expected) <= 1e-10
    assert screen == expected_screen
    first, last = losses(screen)
    assert last < first


@pytest.mark.release
def test_adapters_of_peft_are_ours(adapted):
    _, screen, weights = adapted(2)
    _, by_peft_screen, by_peft = adapted(2, "--peft")
    assert screen == by_peft_screen
    named = {f"base_model.model.{name}": value for name, value in weights.items()}
    assert max_abs_diff(named, by_peft) <= 1e-10


@pytest.mark.parametrize(
    "kind, flags",
    [
        ("llama", ()),
        ("llama-tied", ("--peft",)),  # its embedding, frozen, has two names
        only_in_release("llama-tied", ()),
    ],
)
def test_only_adapters_are_saved_and_reduced(kind, flags, adapted, pretrained):
    """Four blocks have two adapters each, of two matrices; checkpoints, too."""
    folder, _, weights = adapted(2, *flags, kind=kind)
    assert len(weights) == 4 * 2 * 2
    pattern = r"\.lora_[AB]\.weight$"
    assert all(re.search(pattern, name) for name in weights)
    for path in (folder / "work/checkpoints").iterdir():
        state = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        names = [name for name in state if name.startswith("model.")]
        pattern = r"\.lora_[AB](\.default)?\.weight$"
        assert len(names) == 4 * 2 * 2
        assert all(re.search(pattern, name) for name in names)
    trained = sum(weight.nbytes for weight in weights.values())
    seen = torch.load(folder / "rank-1.pt")
    # The blocks' groups alone have something to reduce: not embedding, head and root.
    assert seen["reduce_scatter"] == {"calls": 4, "bytes": trained}
    read = load_file(pretrained(kind) / "model.safetensors")
    assert trained < 0.1 * sum(8 * weight.numel() for weight in read.values())


def test_peft_loads_the_adapters(pretrained, tmp_path):
    """In bfloat16, with adapters in float32; it generates what the script printed."""
    flags = (pretrained("llama"), "--epochs=1", "--peft")
    screen = run(launch(2, LORA, *flags), tmp_path).stdout
    weights = saved(tmp_path)
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    model = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "work/adapters").eval()
    assert model.get_base_model().dtype == torch.bfloat16
    for name, weight in model.named_parameters():
        if "lora_" in name:
            assert weight.equal(weights[name.replace(".default", "")])
    text = model.generate(input_ids=PROMPT, max_new_tokens=6, do_sample=False)[0, 8:]
    assert f"generated: {' '.join(map(str, text.tolist()))}" in screen


@pytest.mark.parametrize("flags", [(), ("--peft",)], ids=["own", "peft"])
def test_adapters_of_a_model_in_float64_are_in_float64(flags, pretrained, tmp_path):
    """Also if torch's default is float32, in which peft makes them."""
    flags = (pretrained("llama"), "--dtype=float64", "--epochs=1", *flags)
    run(launch(1, LORA, *flags), tmp_path)
    assert {weight.dtype for weight in saved(tmp_path).values()} == {torch.float64}


def test_our_adapters_are_loaded_by_the_lines_of_the_page(pretrained, tmp_path):
    """They generate what the script printed."""
    flags = (pretrained("llama"), "--epochs=1", "--out=adapters")
    screen = run(launch(2, LORA, *flags), tmp_path).stdout
    code = re.findall(r"^```python\n(.*?)```", PAGE, re.DOTALL | re.MULTILINE)
    (lines,) = [block for block in code if "adapters.safetensors" in block]
    lines = lines.replace("FOLDER", str(pretrained("llama")))
    lines = lines.replace('"adapters/', f'"{tmp_path}/work/adapters/')
    names = {"__name__": "page"}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        exec(lines, names)
    model = names["model"].eval()
    text = model.generate(input_ids=PROMPT, max_new_tokens=6, do_sample=False)[0, 8:]
    assert f"generated: {' '.join(map(str, text.tolist()))}" in screen


def test_a_trained_weight_that_is_no_adapter_is_refused(pretrained, tmp_path):
    """Otherwise it would begin as zero, without a message."""
    script = tmp_path / "lora.py"
    kept = 'task_type="CAUSAL_LM", modules_to_save=["lm_head"]'
    text = LORA.read_text()
    assert text.count('task_type="CAUSAL_LM"') == 1
    script.write_text(text.replace('task_type="CAUSAL_LM"', kept))
    done = run(launch(1, script, pretrained("llama"), "--peft"), tmp_path, code=2)
    *_, line = done.stderr.splitlines()  # above it peft warns of something else
    assert "lm_head" in line and "is to be trained, but is not an adapter" in line


@pytest.mark.release
def test_adapters_are_resumed(pretrained, adapted, tmp_path):
    flags = ("--checkpoint-dir=checkpoints",)
    train(LORA, pretrained("llama"), 2, tmp_path, *flags, "--epochs=1")
    second, weights = train(LORA, pretrained("llama"), 1, tmp_path, *flags)
    assert second.startswith("resumed from")
    assert max_abs_diff(weights, adapted(1)[2]) <= 1e-10
    sizes = [f.stat().st_size for f in tmp_path.rglob("epoch-0001/*.distcp")]
    assert 0 < sum(sizes) < (pretrained("llama") / "model.safetensors").stat().st_size


# ---- bad input -----------------------------------------------------------------------
def fails(command, folder):
    """Return the only line that each rank prints; the exit code must be 2."""
    done = run(command, folder, code=2)
    assert "Traceback" not in done.stderr
    assert not (folder / "work/adapters").exists()
    (line,) = {line for each in done.ranks for line in each.stderr.splitlines()}
    return line


@pytest.mark.parametrize("script", [BEFORE, FSDP, LORA], ids=lambda path: path.name)
def test_a_folder_without_weights(script, tmp_path):
    words = launch(1, script) if script != BEFORE else ["python", script]
    line = fails([*words, "missing"], tmp_path)
    assert line.endswith("there is no *.safetensors in missing")
    (tmp_path / "work/missing").mkdir()
    save_file({"weight": torch.zeros(1)}, tmp_path / "work/missing/model.safetensors")
    line = fails([*words, "missing"], tmp_path)
    assert line.endswith("there is no config.json in missing")


@each_script
def test_a_download_that_is_not_complete(script, pretrained, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(pretrained("llama"))
    model.save_pretrained(tmp_path / "parts", max_shard_size="100KB")
    first, *_ = sorted(tmp_path.glob("parts/*.safetensors"))
    first.unlink()
    words = launch(2, script) if script != BEFORE else ["python", script]
    line = fails([*words, tmp_path / "parts"], tmp_path)
    assert line.endswith(
        f"{first.name} is not in {tmp_path / 'parts'}: is the download complete?"
    )
    if script != BEFORE:  # without the list of the files, a weight is missing
        (tmp_path / "parts/model.safetensors.index.json").unlink()
        line = fails([*words, tmp_path / "parts"], tmp_path)
        assert "is not in the files of" in line
        assert "Is the download complete?" in line


@pytest.mark.parametrize("script", [FSDP, LORA], ids=lambda path: path.name)
def test_plain_python_names_torchrun(script, pretrained, tmp_path):
    line = fails(["python", script, pretrained("llama")], tmp_path)
    assert "torchrun --standalone --nproc-per-node" in line


@pytest.mark.parametrize("script", [FSDP, LORA], ids=lambda path: path.name)
def test_a_batch_that_cannot_be_divided(script, pretrained, tmp_path):
    flags = (pretrained("llama"), "--batch-size=10")
    line = fails(launch(2, script, *flags), tmp_path)
    assert "--batch-size must be divisible" in line


@each_script
def test_a_batch_larger_than_the_data(script, pretrained, tmp_path):
    words = launch(2, script) if script != BEFORE else ["python", script]
    line = fails([*words, pretrained("llama"), "--batch-size=512"], tmp_path)
    assert line.endswith("--batch-size is more than the 505 training samples")


@pytest.mark.parametrize(
    "script", [FSDP, only_in_release(LORA)], ids=lambda path: path.name
)
def test_a_rank_without_a_sample_to_evaluate(script, pretrained, tmp_path):
    """Otherwise it has an IndexError, and the other ranks wait for it."""
    changed = tmp_path / script.name
    changed.write_text(
        script.read_text().replace("make_dataset(97,", "make_dataset(1,")
    )
    line = fails(launch(2, changed, pretrained("llama")), tmp_path)
    assert line.endswith("1 samples for 2 processes to evaluate")


@pytest.mark.parametrize("script", [FSDP, LORA], ids=lambda path: path.name)
def test_weights_of_other_names(script, pretrained, tmp_path):
    """A base model's file has names without the prefix "model.", and no head."""
    base = tmp_path / "base"
    AutoModel.from_pretrained(pretrained("llama")).save_pretrained(base)
    line = fails(launch(2, script, base), tmp_path)
    assert "is of a LlamaModel, not of a LlamaForCausalLM" in line
    config = json.loads((base / "config.json").read_text())
    config["architectures"] = ["LlamaForCausalLM"]
    (base / "config.json").write_text(json.dumps(config))
    line = fails(launch(2, script, base), tmp_path)
    assert "lm_head.weight is not in the files of" in line
    section = re.search(r"see README.md, (.*)$", line)[1]
    assert section.lower() in PAGE.lower()


def test_an_unknown_architecture(pretrained, tmp_path):
    config = json.loads((pretrained("llama") / "config.json").read_text())
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({**config, "model_type": "nonesuch"}))
    save_file({"weight": torch.zeros(1)}, other / "model.safetensors")
    assert "nonesuch" in fails(launch(1, FSDP, other), tmp_path)


@pytest.mark.parametrize("script", [FSDP, only_in_release(LORA)], ids=lambda p: p.name)
def test_a_model_of_another_class(script, tmp_path):
    """One that has no causal model, and one of which a causal model lacks a part."""
    small = {"d_model": 32, "num_heads": 2, "num_layers": 2}
    T5ForConditionalGeneration(
        T5Config(vocab_size=64, d_kv=16, d_ff=64, **small)
    ).save_pretrained(tmp_path / "t5")
    line = fails(launch(1, script, tmp_path / "t5"), tmp_path)
    assert "Unrecognized configuration class" in line and len(line) < 200
    small = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 64}
    small |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    small |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    small |= {"decoder_start_token_id": 1}
    WhisperForConditionalGeneration(
        WhisperConfig(encoder_ffn_dim=64, decoder_ffn_dim=64, **small)
    ).save_pretrained(tmp_path / "whisper")
    line = fails(launch(1, script, tmp_path / "whisper"), tmp_path)
    named = "is of a WhisperForConditionalGeneration, not of a WhisperForCausalLM"
    assert named in line


def test_an_error_of_transformers_keeps_its_traceback(pretrained, tmp_path):
    """Only what fsdp.py says itself is one line: another ValueError may be a bug."""
    other = shutil.copytree(pretrained("llama"), tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    config["attn_implementation"] = "nonesuch"
    (other / "config.json").write_text(json.dumps(config))
    done = run(launch(1, FSDP, other), tmp_path, code=1)
    assert done.stderr.startswith("[rank0]: Traceback")
    assert "\n[rank0]: ValueError: " in done.stderr


def test_adapters_for_layers_that_the_model_does_not_have(pretrained, tmp_path):
    line = fails(launch(2, LORA, pretrained("gpt2")), tmp_path)
    assert line.endswith("no linear layer is named q_proj or v_proj: --targets")


def test_layers_that_peft_does_not_find(pretrained, tmp_path):
    flags = (pretrained("llama"), "--peft", "--targets", "nonesuch")
    assert "nonesuch" in fails(launch(2, LORA, *flags), tmp_path)


def test_peft_that_is_not_installed(pretrained, tmp_path):
    flags = (pretrained("llama"), "--peft")
    without = functools.partial(spy.without_module, "peft")
    done = run(launch(1, LORA, *flags), tmp_path, prepare=without, code=2)
    assert "--peft needs the package peft: pip install peft" in done.stderr


# ---- the page ------------------------------------------------------------------------
COMMANDS = re.findall(r"^\$ ((?:python|torchrun) .*)$", PAGE, re.MULTILINE)
# The reader's own model is in FOLDER.
COMMANDS = [command for command in COMMANDS if "FOLDER" not in command]


@pytest.mark.release
def test_the_commands_of_the_page_run_in_turn(tmp_path):
    """As they are typed, by the launcher; the loss falls in each that trains."""
    assert len(COMMANDS) >= 4
    trained = 0
    for script in FOLDER.glob("*.py"):
        (tmp_path / script.name).write_text(script.read_text())
    no_gpu = {} if torch.cuda.device_count() >= 2 else {"CUDA_VISIBLE_DEVICES": ""}
    for command in COMMANDS:
        place = tmp_path / "screens" / str(trained)
        done = harness.run(command, place, cwd=tmp_path, **QUIET, **no_gpu)
        if found := losses(done.stdout):
            assert found[-1] < found[0]
            trained += 1
    assert trained >= 3


def blocks_of_step(number):
    """Return the Python code that a step of the page shows."""
    (step,) = re.findall(rf"^{number}\. .*?^{number + 1}\. ", PAGE, re.DOTALL | re.M)
    blocks = re.findall(r"^   ```python\n(.*?)^   ```", step, re.DOTALL | re.M)
    return [re.sub("^   ", "", block, flags=re.M) for block in blocks]


def save_tokenizer(folder):
    """Save a tokenizer of words, which begins each text with a token, as a Llama's."""
    words = ["<end>", "<begin>", *map(str, range(100))]
    tokenizer = Tokenizer(WordLevel({word: n for n, word in enumerate(words)}))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(
        single="<begin> $A", special_tokens=[("<begin>", 1)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<begin>", eos_token="<end>"
    ).save_pretrained(folder)


@pytest.mark.release
def test_the_data_of_the_page(pretrained, tmp_path):
    """fsdp.py trains on texts with the lines of step 3, and generates a text."""
    folder = shutil.copytree(pretrained("llama"), tmp_path / "llama")
    save_tokenizer(folder)
    make_dataset, data, prompt, output = blocks_of_step(3)
    prompt = prompt.replace("Once upon a time", "5 8 11 14")
    text = FSDP.read_text()
    first = text.index("def make_dataset")
    text = text[:first] + make_dataset + text[text.index("\n\ndef collate") :]
    for start, code in (
        ("    train_set, val_set = ", data),
        ("    prompt = ", prompt),
        ('        print("generated:"', output),
    ):
        (line,) = re.findall(f"^{re.escape(start)}.*\n", text, re.M)
        text = text.replace(line, code)
    name = "from transformers import AutoModelForCausalLM\n"
    text = text.replace(name, name + "from transformers import AutoTokenizer\n")
    (tmp_path / "fsdp.py").write_text(text)
    (tmp_path / "work").mkdir()
    counts = [range(n % 7, 90, 3)[: 8 + n % 20] for n in range(96)]
    lines = [json.dumps({"text": " ".join(map(str, count))}) for count in counts]
    (tmp_path / "work/train.jsonl").write_text("\n".join(lines[:72]))
    (tmp_path / "work/val.jsonl").write_text("\n".join(lines[72:]))
    screen = run(launch(2, tmp_path / "fsdp.py", folder), tmp_path).stdout
    assert losses(screen)[-1] < losses(screen)[0]
    assert re.search(r"^generated: (\d+ ?)+", screen, re.M)

    names = {"json": json, "torch": torch}
    exec(make_dataset, names)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    (tmp_path / "long.jsonl").write_text(json.dumps({"text": "7 " * 2000}))
    for path in (tmp_path / "work/train.jsonl", tmp_path / "long.jsonl"):
        found = names["make_dataset"](path, tokenizer)
        assert all(one[0] == 1 and one[-1] == 0 and len(one) <= 1024 for one in found)
    assert len(found[0]) == 1024
