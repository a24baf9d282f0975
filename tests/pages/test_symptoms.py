"""docs/symptoms.md: every row links to a section that shows its words.

The section is in a stage's notebook, in a companion beside it, or on a page in docs/,
for instance on this page. Words with the mark † are quoted and were not produced here;
those with the mark ‡ were, on a GPU, by a program that the page names. What torch says
and does is tested once a week: --release runs it.
"""

import argparse
import contextlib
import os
import pickle
import re
import sys

import nbformat
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from PIL import Image
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict
from torch.distributed.checkpoint.state_dict import set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.checkpoint import checkpoint

from harness import commands
from harness.stages import ROOT
from tests.symptoms_harness import PAGE
from tests.symptoms_harness import rows

WORDS = "06_slurm/demos/nccl_words.py"


def slug(heading):
    """Return the name that GitHub gives to a heading."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def words_of(text):
    """Return the words that the row with a text in it quotes, in their order."""
    ((see, *_),) = [row for row in rows() if text in row[0]]
    return re.findall(r"`([^`]+)`", see)


def shown(cell):
    """Return the lines that a cell shows: its source, and outputs without colors."""
    outputs = [
        output.get("text") or output.data.get("text/plain", "")
        for output in cell.get("outputs", [])
    ]
    text = "\n".join([cell.source, *outputs])
    return re.sub(r"\x1b\[\d+m", "", text).splitlines()


def blocks(path):
    """Yield the lines of a page or of a notebook's cells; whether they are markdown.

    The paragraphs of a page are unwrapped, each to one line.
    """
    if path.suffix == ".md":
        parts = re.split(r"^(```.*?^```)$", path.read_text(), flags=re.M | re.DOTALL)
        for number, part in enumerate(parts):
            if number % 2 == 0:  # not the code between two fences
                part = re.sub(r"(?<=[^\n|])\n(?=[^\n#|])", " ", part)
            yield part.splitlines(), True
    else:
        for cell in nbformat.read(path, as_version=4).cells:
            yield shown(cell), cell.cell_type == "markdown"


def sections(path):
    """Return {slug: (heading, lines)} of a page or a notebook.

    A section's lines end at the next heading of its level. No two headings may have the
    same slug.
    """
    found, inside = {}, []
    for block, text in blocks(path):
        fenced = False
        for line in block:
            fenced ^= line.startswith("```")
            if text and not fenced and (match := re.match(r"(#+) (.+)", line)):
                level, heading = len(match[1]), match[2]
                assert slug(heading) not in found, heading
                found[slug(heading)] = heading, []
                inside = [each for each in inside if each[0] < level]
                inside.append((level, found[slug(heading)][1]))
            for _, texts in inside:
                texts.append(line)
    return found


def label_of(file, heading):
    """Return what a link to a section is called: NN: heading, or on a page heading."""
    if not file.endswith(".ipynb"):
        return heading
    stage = file.split("/")[1][:2]
    return f"{stage}: {heading.removeprefix(f'{stage} · ')}"


@pytest.mark.parametrize("file", sorted({row[2] for row in rows()}))
def test_a_row_links_to_a_section_that_shows_its_words(file):
    if file.endswith(".py"):
        program = PAGE.parent / file
        there = {None: (program.name, program.read_text().splitlines())}
    else:
        there = sections((PAGE.parent / file).resolve() if file else PAGE)
    for see, label, _, anchor in [row for row in rows() if row[2] == file]:
        assert anchor in there, f"{file} has no section {anchor}"
        heading, text = there[anchor]
        assert label == label_of(file, heading)
        for words in re.findall(r"`([^`]+)`", see):
            pattern = ".*".join(map(re.escape, words.split("...")))
            found = any(re.search(pattern, line) for line in text)
            assert found, f"{label} does not show: {words}"
        if "†" in see:
            said = re.search("not (produced|run) here|quoted", "\n".join(text), re.I)
            assert said, label


def test_a_section_of_the_page_names_its_source_or_a_test():
    marks = {}
    for see, _, file, anchor in rows():
        if not file:
            marks[anchor] = marks.get(anchor, set()) | {m for m in "†‡" if m in see}
    there = sections(PAGE)
    inside = "\n".join(there["explained-here"][1])
    assert set(marks) == {
        slug(heading) for heading in re.findall("^### (.*)", inside, re.M)
    }
    for anchor, found in marks.items():
        text = "\n".join(there[anchor][1])
        assert ("†" in found) == ("Not produced here" in text), anchor
        assert ("‡" in found) == ("Seen on a GPU" in text), anchor
        assert ("‡" in found) == (f"](../{WORDS})" in text), anchor
        assert found or "(../tests/" in text, anchor


def test_the_program_that_speaks_on_a_gpu_has_what_the_page_names():
    kinds = re.findall(r"^def (\w+)\(\):", (ROOT / WORDS).read_text(), re.M)
    named = re.findall(
        r"nccl_words.py\)? ?`?(\w+)`", " ".join(PAGE.read_text().split())
    )
    assert len(named) >= 5 and set(named) <= set(kinds)


@pytest.mark.release
def test_models_of_different_sizes():
    """The one thing that this program says on CPUs, too."""
    command = f"torchrun --standalone --nproc-per-node=2 {WORDS} other_models"
    done = commands.run(command, code=1, forks=True)
    assert words_of("appears not to match")[0] in done.stderr


class CalledTwice(nn.Module):
    """A layer that is called twice, both times with activation checkpointing."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.use_reentrant = use_reentrant

    def forward(self, x):
        x = self.layers[0](x)
        for _ in range(2):
            x = checkpoint(self.layers[1], x, use_reentrant=self.use_reentrant)
        return x


class WithTransposedBuffer(nn.Module):
    """A layer and a buffer that is a transposed view, or with `cloned` a copy of it."""

    def __init__(self, cloned):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        pe = torch.zeros(1, 5, 3).transpose(0, 1)
        if cloned:
            pe = pe.clone(memory_format=torch.contiguous_format)
        self.register_buffer("pe", pe)

    def forward(self, x):
        return self.layer(x) + self.pe[0]


def compute(wrapped):
    wrapped(torch.ones(2, 3)).sum().backward()


def ready_twice(right):
    compute(DistributedDataParallel(CalledTwice(use_reentrant=not right)))


def first_step_under_no_sync(right):
    wrapped = DistributedDataParallel(nn.Linear(3, 3), static_graph=True)
    with contextlib.nullcontext() if right else wrapped.no_sync():
        compute(wrapped)


def not_on_the_gpu_that_is_named(right):
    DistributedDataParallel(nn.Linear(3, 3), device_ids=None if right else [0])


def frozen_teacher(right):
    DistributedDataParallel(nn.Linear(3, 3).requires_grad_(right))


def transposed_buffer(right):
    compute(DistributedDataParallel(WithTransposedBuffer(cloned=right)))


WITH_DDP = {  # {a text of a row: what does it wrong, or right}
    "ready only once": ready_twice,
    "expect_autograd_hooks_": first_step_under_no_sync,
    "device_ids and output": not_on_the_gpu_that_is_named,
    "single memory": transposed_buffer,
    "is not needed when a module": frozen_teacher,
}


@pytest.mark.release
@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("text", WITH_DDP)
def test_what_ddp_says(text):
    with pytest.raises((RuntimeError, ValueError)) as error:
        WITH_DDP[text](right=False)
    for words in words_of(text):
        assert words in str(error.value)
    WITH_DDP[text](right=True)


@pytest.mark.release
def test_a_file_of_more_than_weights(tmp_path):
    _, lines = sections(PAGE)["not-only-weights-weights-only-load-failed"]
    text = "\n".join(lines)
    path = tmp_path / "all.pt"
    torch.save({"args": argparse.Namespace(lr=0.1)}, path)
    with pytest.raises(
        pickle.UnpicklingError, match="Weights only load failed"
    ) as error:
        torch.load(path)
    names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    assert names == ["argparse.Namespace"] and names[0] in str(error.value)
    assert f"`{names[0]}`" in text
    with torch.serialization.safe_globals([argparse.Namespace]):
        assert torch.load(path)["args"].lr == 0.1


@pytest.mark.release
@pytest.mark.usefixtures("group")
def test_what_dcp_load_says(tmp_path):
    def make(width, layers):
        model = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])
        fully_shard(model, mesh=dist.init_device_mesh("cpu", (1,)))
        return {"model": model.state_dict()}

    def load(state, folder, said):
        _, lines = sections(PAGE)["what-dcpload-says"]
        assert f"`{said}" in "\n".join(lines)
        with pytest.raises(dcp.CheckpointException) as error:
            dcp.load(state, checkpoint_id=folder)
        assert not isinstance(error.value, Exception)
        pattern = ".*".join(map(re.escape, said.split("...")))
        assert re.match("CheckpointException ranks:", str(error.value))
        assert re.search(pattern, str(error.value))
        return str(error.value)

    folder = tmp_path / "checkpoint"
    dcp.save(make(4, 2), checkpoint_id=folder)
    width = "Size mismatch between saved torch.Size([4, 4]) and current: torch.Size([8"
    load(make(8, 2), folder, width)
    names = "Missing key in checkpoint state_dict: model.2.weight."
    load(make(4, 3), folder, names)
    if "read failed" in load(make(4, 2), tmp_path, "metadata is None"):
        # torch 2.11 does not say why
        load(make(4, 2), tmp_path, "No such file or directory: '.../.metadata'")
    (path,) = folder.glob("*.distcp")
    unreadable = "PytorchStreamReader failed reading zip archive"
    with pytest.raises(RuntimeError, match=unreadable):
        torch.load(path)
    for size, said in ((path.stat().st_size - 1, unreadable), (0, "EOFError")):
        os.truncate(path, size)
        load(make(4, 2), folder, said)


def two_steps(model, optimizer):
    for _ in range(2):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def resumed(folder, model, optimizer):
    """Load both from a checkpoint of `both`, as the documentation of DCP says."""
    weights, state = get_state_dict(model, optimizer)
    both = {"model": weights, "optimizer": state}
    dcp.load(both, checkpoint_id=folder)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=both["model"],
        optim_state_dict=both["optimizer"],
    )


def saved(folder, model, optimizer):
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)


@pytest.mark.release
@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("gradients", [False, True])
def test_the_optimizers_state_is_not_loaded_beside_gradients(tmp_path, gradients):
    def make():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        fully_shard(model, mesh=dist.init_device_mesh("cpu", (1,)))
        return model, torch.optim.AdamW(model.parameters())

    before, after = make(), make()
    two_steps(*before)
    saved(tmp_path, *before)
    model, optimizer = after
    model(torch.ones(1, 4)).sum().backward()  # a warm-up
    if not gradients:
        optimizer.zero_grad()
    resumed(tmp_path, model, optimizer)
    assert len(optimizer.state) == (0 if gradients else 4)
    for old, new in zip(before[0].parameters(), model.parameters(), strict=True):
        assert new.full_tensor().equal(old.full_tensor())


@pytest.mark.release
@pytest.mark.usefixtures("group")
def test_what_a_model_lacks_is_ignored(tmp_path):
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    larger, smaller = nn.Sequential(*layers), nn.Sequential(nn.Linear(4, 4))
    dcp.save({"model": larger.state_dict()}, checkpoint_id=tmp_path)
    dcp.load({"model": smaller.state_dict()}, checkpoint_id=tmp_path)
    assert smaller[0].weight.equal(larger[0].weight)


@pytest.mark.release
@pytest.mark.usefixtures("group")
def test_a_parameter_group_without_parameters(tmp_path):
    assert words_of("`KeyError: 'betas'` in the first") == ["KeyError: 'betas'"]
    model = nn.Linear(4, 4)
    groups = [{"params": [], "lr": 1e-5}, {"params": list(model.parameters())}]
    optimizer = torch.optim.AdamW(groups)
    two_steps(model, optimizer)
    saved(tmp_path, model, optimizer)
    resumed(tmp_path, model, optimizer)
    with pytest.raises(KeyError, match="betas"):
        two_steps(model, optimizer)


@pytest.mark.release
@pytest.mark.usefixtures("group")
def test_a_scheduler_takes_the_decayed_rate_after_dcp_load(tmp_path):
    def make():
        layer = nn.Linear(4, 4)
        return layer, torch.optim.AdamW(layer.parameters(), lr=0.1)

    def load(layer, optimizer):
        state = get_optimizer_state_dict(layer, optimizer)
        dcp.load(state, checkpoint_id=tmp_path)
        set_optimizer_state_dict(layer, optimizer, state)
        return optimizer

    layer, optimizer = make()
    scheduler = CosineAnnealingLR(optimizer, 10)
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    dcp.save(get_optimizer_state_dict(layer, optimizer), checkpoint_id=tmp_path)

    resumed = load(*make())
    assert "initial_lr" not in resumed.param_groups[0]
    (words,) = words_of("initial_lr")
    with pytest.raises(KeyError, match=re.escape(words)):
        CosineAnnealingLR(resumed, 10, last_epoch=2)
    (base,) = CosineAnnealingLR(resumed, 10).base_lrs
    assert f"{base:.3f}" == "0.079"

    layer, optimizer = make()
    again = CosineAnnealingLR(optimizer, 10)
    load(layer, optimizer)
    again.load_state_dict(scheduler.state_dict())
    for each in (scheduler, again):
        each.optimizer.step()
        each.step()
    assert again.base_lrs == [0.1]
    assert again.get_last_lr() == scheduler.get_last_lr()


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.middle = nn.Embedding(8, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight


@pytest.mark.release
@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("shard_first", [False, True])
def test_to_empty_unties_weights_unless_they_are_sharded(shard_first):
    with torch.device("meta"):
        model = Tied()
    assert len(list(model.parameters())) == 3
    if shard_first:
        fully_shard(model, mesh=dist.init_device_mesh("cpu", (1,)))
    model.to_empty(device="cpu")
    assert len(list(model.parameters())) == (3 if shard_first else 4)
    assert (model.head.weight is model.embedding.weight) == shard_first


def join_group(rank, folder):
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)


def norms_of_meshes(rank, folder):
    """Compare the ranks' norms of the gradient, for a mesh, a dimension of it, none."""
    join_group(rank, folder)
    mesh = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    for used, equal in ((mesh, True), (mesh["shard"], False), (None, True)):
        torch.manual_seed(0)
        layer = nn.Linear(4, 4)
        fully_shard(layer, mesh=used)
        layer(torch.full((2, 4), 1.0 + rank)).square().sum().backward()
        norm = nn.utils.get_total_norm([w.grad for w in layer.parameters()])
        norms = [None, None]
        dist.all_gather_object(norms, norm.full_tensor().item())
        assert (abs(norms[0] - norms[1]) < 1e-4) == equal, (used, norms)
    dist.destroy_process_group()


def skip_a_batch(rank, folder):
    """Train on six batches, of which rank 1 skips the third for itself."""
    join_group(rank, folder)
    layer = nn.Linear(6, 1, bias=False)
    nn.init.zeros_(layer.weight)
    wrapped = DistributedDataParallel(layer)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1)
    try:
        for number, batch in enumerate(torch.eye(6)):
            if rank == 1 and number == 2:
                continue
            (-wrapped(batch)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    except RuntimeError as error:
        assert rank == 0 and number == 5
        assert re.search("Connection (closed|reset) by peer", str(error))
    else:
        assert rank == 1
    # Each batch adds a half for each rank that has trained on it.
    assert layer.weight.tolist() == [[1, 1, 0.5, 1, 1, 0.5]]
    os._exit(0)  # the group is broken


@pytest.mark.release
def test_a_function_that_is_compiled_for_every_shape():
    program = (
        "import torch\n"
        "double = torch.compile(lambda x: x * 2, backend='eager', dynamic=False)\n"
        "for size in range(2, 12): double(torch.ones(size))\n"
    )
    (words,) = words_of("recompile_limit")
    for dynamic in (False, True):
        code = program.replace("dynamic=False", f"dynamic={dynamic}")
        done = commands.run([sys.executable, "-c", code])
        assert (f"{words} (8)" in done.stderr) == (not dynamic)


def reduce_metrics(rank, folder):
    """Average a dict of metrics, as a script does that forgets what the other has."""
    join_group(rank, folder)
    metrics = [{"mask": 10.0, "kpt": 100.0}, {"kpt": 200.0, "text": 5.0}][rank]
    means = {}
    for name, value in metrics.items():
        total = torch.tensor(value)
        dist.all_reduce(total)
        means[name] = total.item() / 2
    dist.destroy_process_group()
    if rank == 0:
        assert means == {"mask": 105, "kpt": 52.5}
        text = "\n".join(sections(PAGE)["metrics-whose-keys-differ-by-rank"][1])
        assert "105" in text and "52.5" in text


@pytest.mark.release
@pytest.mark.parametrize("be_a_rank", [norms_of_meshes, skip_a_batch, reduce_metrics])
def test_what_two_ranks_do_without_an_error(be_a_rank, tmp_path):
    commands.call_in_forks(be_a_rank, [(rank, tmp_path) for rank in (0, 1)])


@pytest.mark.release
def test_images_of_16_bits_and_damaged_ones(tmp_path):
    truncated, unknown = words_of("image file is truncated")
    ramp = np.arange(2**16, dtype=np.uint16).reshape(256, 256)
    for name in ("ramp.tif", "ramp.png"):
        Image.fromarray(ramp).save(tmp_path / name)
        red = np.asarray(Image.open(tmp_path / name).convert("RGB"))[..., 0]
        assert f"{(red == 255).mean():.1%}" == "99.6%"
        scaled = (np.asarray(Image.open(tmp_path / name)) / 257).round()
        assert scaled.max() == 255 and (scaled == 255).mean() < 0.01
    unit = Image.fromarray((ramp / 65535).astype(np.float32))
    assert np.asarray(unit.convert("RGB")).max() <= 1

    photo = tmp_path / "photo.jpg"
    noise = np.random.default_rng(0).integers(256, size=(256, 256, 3), dtype=np.uint8)
    Image.fromarray(noise).save(photo)
    os.truncate(photo, photo.stat().st_size // 2)
    with pytest.raises(OSError, match=truncated):
        Image.open(photo).load()
    photo.write_bytes(b"not an image")
    with pytest.raises(OSError, match=unknown):
        Image.open(photo)


@pytest.mark.release
def test_a_full_disk():
    container, position, _ = words_of("unexpected pos")
    with pytest.raises(RuntimeError, match=container) as error:
        torch.save(torch.ones(100_000), "/dev/full")
    assert re.search(position.replace("...", r"\d+"), str(error.value))


@pytest.mark.release
@pytest.mark.usefixtures("group")
def test_clipping_weights_of_two_meshes():
    (words,) = words_of("aten.stack.default")
    mesh = dist.init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
    dense, expert = nn.Linear(4, 4), nn.Linear(4, 4)
    fully_shard(dense, mesh=mesh["a"])
    fully_shard(expert, mesh=mesh["b"])
    expert(dense(torch.ones(2, 4))).square().sum().mul(1000).backward()
    groups = [list(layer.parameters()) for layer in (dense, expert)]
    with pytest.raises(RuntimeError, match=words):
        nn.utils.clip_grad_norm_(sum(groups, []), 1.0)
    gradients = [[weight.grad for weight in group] for group in groups]
    norms = [nn.utils.get_total_norm(each).full_tensor() for each in gradients]
    total = torch.stack(norms).norm()
    for group in groups:
        nn.utils.clip_grads_with_norm_(group, 1.0, total)
    clipped = torch.stack([g.full_tensor().norm() for g in sum(gradients, [])])
    assert total > 1 and abs(clipped.norm() - 1) < 1e-4
