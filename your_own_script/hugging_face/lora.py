"""Train adapters alone: torchrun --standalone --nproc-per-node=N lora.py MODEL

The data, the loop and most flags are those of fsdp.py: copy it and sharded.py with this
script.
"""

import gc
import importlib.util
import math
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.checkpoint.state_dict import set_model_state_dict
from transformers import AutoModelForCausalLM
from transformers import BitsAndBytesConfig

from fsdp import generate
from fsdp import init_processes
from fsdp import make_loaders
from fsdp import make_parser
from fsdp import parse_args
from fsdp import train
from sharded import ModelError
from sharded import allocate
from sharded import gather_weights
from sharded import load_weights
from sharded import make_model
from sharded import shard_model

try:
    import peft
except ModuleNotFoundError:
    peft = None  # only --peft needs it


class LoRA(nn.Module):
    """A frozen linear layer, plus the product of two small matrices that are trained.

    From "LoRA: Low-Rank Adaptation of Large Language Models" (Hu et al., 2021). There,
    what is added is multiplied by alpha / r, which is 2 here.
    """

    def __init__(self, layer, rank, dtype):
        super().__init__()
        self.base_layer = layer
        self.lora_A = nn.Linear(layer.in_features, rank, bias=False, dtype=dtype)
        self.lora_B = nn.Linear(rank, layer.out_features, bias=False, dtype=dtype)

    def forward(self, x):
        return self.base_layer(x) + 2 * self.lora_B(self.lora_A(x))


def add_lora(model, targets, rank, dtype):
    """Freeze all weights, and add adapters to the linear layers of these names."""
    model.requires_grad_(False)
    for name, layer in list(model.named_modules()):
        parent, _, last = name.rpartition(".")
        if last in targets and isinstance(layer, nn.Linear):
            adapted = LoRA(layer, rank, dtype)
            setattr(model.get_submodule(parent), last, adapted)
    if not any(weight.requires_grad for weight in model.parameters()):
        text = f"no linear layer is named {' or '.join(targets)}: --targets"
        raise ModelError(text)


def add_lora_by_peft(model, targets, rank, dtype):
    """Do the same with peft."""
    config = peft.LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules=targets, task_type="CAUSAL_LM"
    )
    try:
        model = peft.get_peft_model(model, config)
    except ValueError as error:  # for instance none of these layers
        raise ModelError(str(error).partition("\n")[0]) from error
    for name, weight in model.named_parameters():
        if not weight.requires_grad:
            continue
        if "lora_" not in name:  # for instance of peft's modules_to_save
            text = f"{name} is to be trained, but is not an adapter: it is not loaded"
            raise ModelError(text)
        weight.data = weight.data.to(dtype)  # peft makes all adapters float32
    return model


@torch.no_grad()
def init_adapters(model):
    """Draw the adapters that every number of processes begins with."""
    torch.manual_seed(0)
    adapters = {}
    for name, weight in model.named_parameters():
        if "lora_" not in name:
            continue
        adapters[name] = torch.zeros(weight.shape, dtype=weight.dtype)
        if "lora_A" in name:  # B stays 0, so at first the model is as it was
            nn.init.kaiming_uniform_(adapters[name], a=math.sqrt(5))
    # Every rank has drawn all of them, and keeps its shards. Drawn in shards, they
    # would depend on the number of processes.
    options = StateDictOptions(full_state_dict=True, strict=False)
    set_model_state_dict(model, adapters, options=options)


def name_in_files(name):
    """Return a weight's name in the files, which have no adapters; None for those."""
    return None if "lora_" in name else name.replace(".base_layer", "")


def load_in_4bit(folder, dtype):
    """Return a model whose linear layers, except the head, have 4 bits per weight.

    dtype: of all other weights, and of the tensors that the bits are stored in. If FSDP
    gathers in another one, it converts these tensors as if they were numbers.
    """
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_quant_storage=dtype,
    )
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, quantization_config=config
    )
    # Otherwise, on a CPU with AVX512-BF16, bitsandbytes takes the bits for reordered
    # after an evaluation, and no adapter gets a gradient.
    for layer in model.modules():
        layer.support_avx512bf16_for_cpu = False
    return model


def load_model(args, device, mesh):
    """Return the sharded model with its adapters."""
    dtype = getattr(torch, args.dtype)
    # The adapters are float32, because they are trained; or float64, as the others.
    adapter = args.targets, args.lora_rank, torch.promote_types(dtype, torch.float32)
    model = make_model(args.model, AutoModelForCausalLM, dtype)
    if args.load_in_4bit:  # each rank holds all of it until it is sharded
        model = load_in_4bit(args.model, torch.bfloat16 if args.bf16 else dtype)
    # Before fully_shard: adapters that are added later are not sharded, and their
    # gradients are not averaged.
    with device if args.load_in_4bit else torch.device("meta"):
        if args.peft:
            model = add_lora_by_peft(model, *adapter)
        else:
            add_lora(model, *adapter)
    base_model = model.get_base_model() if args.peft else model
    shard_model(base_model, mesh, args.bf16)
    if not args.load_in_4bit:
        allocate(base_model, device)
        load_weights(base_model, args.model, name_in_files)
    init_adapters(model)
    return model


def main():
    parser = make_parser()
    # Another folder than fsdp.py's, which writes a whole model. Frozen weights stay
    # bfloat16, because nothing is added to them.
    parser.set_defaults(out=Path("adapters"), dtype="bfloat16")
    parser.add_argument("--peft", action="store_true", help="adapters made by peft")
    parser.add_argument("--load-in-4bit", action="store_true", help="QLoRA")
    parser.add_argument("--lora-rank", type=int, default=8)
    parser.add_argument("--targets", nargs="+", default=["q_proj", "v_proj"])
    args = parse_args(parser)
    # Otherwise a float32 adapter gets bfloat16 inputs, and refuses them.
    args.bf16 |= args.dtype == "bfloat16"
    if args.peft and peft is None:  # one line, not a traceback
        parser.error("--peft needs the package peft: pip install peft")
    if args.load_in_4bit and importlib.util.find_spec("bitsandbytes") is None:
        parser.error("--load-in-4bit needs a package: pip install bitsandbytes")
    if args.load_in_4bit and args.dtype == "float64":
        parser.error("--load-in-4bit goes with --dtype bfloat16 or float32")
    device, mesh = init_processes()
    train_loader, val_loader = make_loaders(parser, args)
    try:
        model = load_model(args, device, mesh)
    except ModelError as error:
        parser.error(str(error))
    # Frozen weights never get a gradient, and need no state.
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=args.lr)
    train(args, model, optimizer, train_loader, val_loader, device)
    text = generate(model, device)
    weights = gather_weights(model, frozen=False)
    if dist.get_rank() == 0:
        print("generated:", text)
        args.out.mkdir(parents=True, exist_ok=True)
        if args.peft:  # with the adapter_config.json that PeftModel needs
            model.save_pretrained(args.out, state_dict=weights)
        else:
            save_file(weights, args.out / "adapters.safetensors")


if __name__ == "__main__":
    main()
    gc.collect()  # on gloo, a model still alive can abort the process at exit
    dist.destroy_process_group()
