"""A model of transformers with FSDP2: sharded, loaded, saved, resumed.

fine_tune.py trains such a model: copy this file with it. All ranks call these
functions, with the same arguments. Folders are Paths.
"""

import shutil

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig
from transformers import GenerationConfig


class ModelError(ValueError):
    """A model does not fit these functions. The message is one line, for the user."""


# ---- the model -----------------------------------------------------------------------
def make_model(folder, auto_class, dtype):
    """Return the model of a folder on the meta device: it has shapes and no memory.

    auto_class: such as AutoModelForCausalLM. Without dtype=, the weights would keep the
    file's bfloat16, in which small updates are rounded away. Raises ModelError if the
    files are of a model of another class: this one would lack parts of it.
    """
    try:
        config = AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            model = auto_class.from_config(config, dtype=dtype)
    except ValueError as error:  # for instance an unknown architecture
        raise ModelError(str(error).partition("\n")[0]) from error
    ours, theirs = type(model).__name__, config.architectures or []
    if theirs and ours not in theirs:
        text = f"config.json is of a {' or '.join(theirs)}, not of a {ours}"
        raise ModelError(f"{text}: name its class in load_model")
    for weight in model.parameters():  # transformers keeps some in float32, as the
        weight.data = weight.data.to(dtype)  # routers' of a DeepSeek: FSDP needs one
    if (folder / "generation_config.json").exists():  # from_config does not read it
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def shard_model(model, mesh, bf16, lists=()):
    """Shard each block, the embedding and the head; the root takes what is left.

    bf16: whether to gather the weights in 16 bits, and average the gradients in 32.
    lists: of blocks, such as model.model.layers; by default the first one of as many
    modules as config.json has layers. Raises ModelError if there is none.
    """
    options = {"mesh": mesh}
    if bf16:
        policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
        options["mp_policy"] = policy
    blocks = [block for each in lists or [find_blocks(model)] for block in each]
    try:
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    except NotImplementedError:  # of a wav2vec2, which has neither
        embedding, head = None, None
    ends = [each for each in (embedding, head) if hasattr(each, "weight")]
    for block in blocks:
        fully_shard(block, **options)
    if len({each.weight for each in ends}) == len(ends):  # otherwise they are tied, and
        for each in ends:  # one weight cannot be in two groups
            # Backward begins with the head, so there is no use in freeing it before.
            fully_shard(each, reshard_after_forward=each is not head, **options)
        if isinstance(embedding, nn.Embedding) and not embedding.weight.requires_grad:
            # Otherwise it is gathered in backward, but nobody waits for that, and up to
            # torch 2.14 it can overwrite the next gathers on GPUs.
            embedding.set_unshard_in_backward(False)
    fully_shard(model, **options)


def find_blocks(model):
    """Return the list of blocks: model.layers of a Llama, transformer.h of a GPT-2."""
    # A list of another length is of something else, such as a vision tower.
    depth = model.config.get_text_config().num_hidden_layers
    lists = [each for each in model.modules() if isinstance(each, nn.ModuleList)]
    for each in lists:
        if len(each) == depth:
            return each
    raise ModelError(f"there is no list of {depth} blocks: give shard_model yours")


def allocate(model, device):
    """Give a sharded model memory for its shards, and buffers their values."""
    model.to_empty(device=device)
    # What is not in the files, such as the frequencies of Llama's positions, is now
    # whatever to_empty() found in memory. initialize_weights() computes it. It leaves
    # weights with this mark alone: they are loaded next, and drawing shards can fail.
    for weight in model.parameters():
        weight._is_hf_initialized = True
    # Otherwise it takes FSDP's class for code of the user's, and computes no buffer of
    # a module without weights, such as that of a Falcon-H1's blocks.
    model.is_custom_code = lambda: False
    model.initialize_weights()


def load_weights(model, folder):
    """Load the weights of a folder; each rank reads its own slices of the files.

    Adapters of peft are in no file, and have no value then. Raises ModelError if
    another weight is not in the files.
    """
    reader = dcp.HuggingFaceStorageReader(folder)
    names = reader.read_metadata().state_dict_metadata
    # A file of the base model, such as GPT-2's, has names without this prefix.
    prefix = f"{model.base_model_prefix}."
    once = dict(model.named_parameters()).keys()
    weights = {}
    # state_dict() reshards first: what is loaded into gathered weights is lost.
    for name, tensor in model.state_dict().items():
        if "lora_" in name:
            continue
        in_files = name.replace(".base_layer", "")  # as peft calls what it adapts
        if in_files not in names:
            in_files = in_files.removeprefix(prefix)
        if in_files in names:
            weights[in_files] = tensor
        elif name in once:  # not the second name of a tied weight, which files lack
            text = f"{name} is not in the files of {folder}. Is the download complete?"
            raise ModelError(f"{text} If its names differ: --rank-0-reads")
    dcp.load(weights, storage_reader=reader)  # in place, and converted to their dtype


def load_from_rank_0(model, folder, auto_class):
    """Load what from_pretrained makes of a folder, on rank 0: for files of other names.

    Rank 0 needs CPU memory for the whole model, and each device for its largest weight.
    """
    weights = {}
    if dist.get_rank() == 0:
        plain = auto_class.from_pretrained(folder, dtype=model.dtype)
        weights = plain.state_dict()
    options = state_dict.StateDictOptions(
        full_state_dict=True, broadcast_from_rank0=True
    )
    state_dict.set_model_state_dict(model, weights, options=options)


# ---- checkpoints ---------------------------------------------------------------------
# Frozen weights are in the model's files, so a checkpoint does without them. Without
# strict=False, set_state_dict would miss them.
TRAINED = state_dict.StateDictOptions(ignore_frozen_params=True, strict=False)


def select(model, weights, frozen=False):
    """Return a state dict with a tied weight once, and frozen weights if asked for.

    ignore_frozen_params alone leaves a frozen weight in under the second of its names.
    """
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    wanted = {name for name, w in model.named_parameters() if frozen or w.requires_grad}
    return {name: w for name, w in weights.items() if name not in names - wanted}


def get_training_state(model, optimizer):
    """Return what a checkpoint has: trained weights, buffers, the optimizer's state."""
    weights, state = state_dict.get_state_dict(model, optimizer, options=TRAINED)
    return {"model": select(model, weights), "optimizer": state}


def save_checkpoint(folder, epoch, model, optimizer):
    """Write what is needed to resume after this epoch."""
    path = folder / f"epoch-{epoch:04}"
    unfinished = folder / f".{path.name}.tmp"
    if dist.get_rank() == 0:  # otherwise shards that a killed save has left stay in it
        shutil.rmtree(unfinished, ignore_errors=True)
    dist.barrier()  # otherwise rank 0 can remove the new folder, too
    # Each rank writes its own shards, and rank 0 writes .metadata after all of them.
    dcp.save(get_training_state(model, optimizer), checkpoint_id=unfinished)
    if dist.get_rank() == 0:
        unfinished.rename(path)


def load_latest(folder, model, optimizer):
    """Load the latest checkpoint, of any number of ranks; return its epoch, or 0."""
    found = [max(folder.glob("epoch-*"), default=None)]
    # Rank 0's: otherwise the ranks could resume from different epochs.
    dist.broadcast_object_list(found)
    if found[0] is None:
        return 0
    # dcp.load fills the tensors that it is given: get_state_dict makes them.
    state = get_training_state(model, optimizer)
    dcp.load(state, checkpoint_id=found[0])
    state_dict.set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=TRAINED,
    )
    if dist.get_rank() == 0:
        print(f"resumed from {found[0]}")
    return int(found[0].name.removeprefix("epoch-"))


def gather_weights(model, frozen=True):
    """Return whole weights on rank 0, in CPU memory; frozen ones only if asked for.

    On the other ranks the dict is empty. save_pretrained cannot write shards.
    """
    options = state_dict.StateDictOptions(
        full_state_dict=True, cpu_offload=True, ignore_frozen_params=not frozen
    )
    weights = state_dict.get_model_state_dict(model, options=options)
    return select(model, weights, frozen)


def make_plain(model, dtype):
    """Return the model on the meta device, of the class that FSDP has derived from."""
    _, plain_class = type(model).__bases__
    with torch.device("meta"):
        plain = plain_class._from_config(model.config, dtype=dtype)
    if plain.can_generate():  # otherwise there is none, as of an image classifier
        plain.generation_config = model.generation_config
    return plain


def save_model(model, weights, folder):
    """Write whole weights, on rank 0, as save_pretrained does on one process.

    FSDP's class has a name of its own, for which transformers knows no conversion: some
    models, such as Qwen2.5-VL, would have other names in the file than in the download.
    """
    dtype = next(iter(weights.values())).dtype
    make_plain(model, dtype).save_pretrained(folder, state_dict=weights)
