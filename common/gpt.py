"""A small GPT on bytes, its optimizer's groups, and its speed."""

import torch
from torch import nn

# FLOP/s of matrix products in bf16 and in fp16, without sparsity: NVIDIA's data sheets
PEAKS = {
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200": 989e12,
}


class Attention(nn.Module):
    """Causal self-attention: a position sees itself and those before it.

    Maps [B, T, width] to the same shape.
    """

    def __init__(self, width, heads):
        super().__init__()
        self.head_dim = width // heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        # A head's queries, keys and values are next to each other, and the number of
        # heads is not fixed here: a slice of the rows of `qkv` can be whole heads.
        qkv = self.qkv(x).unflatten(-1, (-1, 3 * self.head_dim))
        # each [B, heads, T, head_dim]; chunk first: otherwise backward copies twice
        q, k, v = (each.transpose(1, 2) for each in qkv.chunk(3, dim=-1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class TransformerBlock(nn.Module):
    """Attention, then a small network at each position; each adds to its input."""

    def __init__(self, width, heads):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.activation = nn.GELU()
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(self.activation(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A decoder-only transformer as in GPT-2 (Radford et al., 2019), without dropout.

    Maps int64 tokens [B, T], with T at most `context_length`, to logits
    [B, T, vocabulary]: at each position those of the token after it.

    Norms are in front of the layers, and positions are learned. Layer norm looks at one
    position at a time and GELU is smooth, so the model computes the same on any number
    of processes.
    """

    def __init__(self, vocabulary, context_length, width=64, depth=2, heads=4):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context_length, width)
        self.blocks = nn.ModuleList(
            TransformerBlock(width, heads) for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.reset_parameters()

    def reset_parameters(self):
        """Draw all initial weights, also of a model that was made without memory.

        As in GPT-2: normal with a standard deviation of 0.02. Each block adds to its
        input twice; the layers that do are smaller by the root of the number of such
        additions, so that the sum does not grow with the depth.
        """
        for name, module in self.named_modules():
            if isinstance(module, nn.LayerNorm):
                module.reset_parameters()
            elif isinstance(module, (nn.Linear, nn.Embedding)):
                adds = name.endswith((".out", ".down"))
                std = 0.02 / (2 * len(self.blocks)) ** 0.5 if adds else 0.02
                nn.init.normal_(module.weight, std=std)
                if getattr(module, "bias", None) is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, tokens):
        positions = torch.arange(tokens.size(1), device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def decay_groups(model, weight_decay):
    """Return an optimizer's parameter groups: matrices decay; biases and norms do not.

    Biases and the factors of norms are vectors, and few: decay does not make the model
    simpler there, and it holds norms below the scale that they should have.
    """
    matrices = [each for each in model.parameters() if each.dim() >= 2]
    vectors = [each for each in model.parameters() if each.dim() < 2]
    return [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]


def describe_speed(args, tokens_per_s):
    """Return the speed of this process as text: tokens per second, and its MFU.

    MFU, model FLOPs utilization, is what the model requires, by the count of PaLM
    (Chowdhery et al., 2022, appendix B), divided by the device's peak. It is shown with
    --amp on the GPUs of PEAKS.
    """
    text = f"{tokens_per_s:,.0f} tokens/s per process"
    if args.amp == "off" or args.device.type != "cuda":
        return text
    name = torch.cuda.get_device_name(args.device)
    if name not in PEAKS:
        return text
    weights = 12 * args.depth * args.width**2 + 256 * args.width  # of linear layers
    flops = 6 * weights + 12 * args.depth * args.context_length * args.width
    flops /= getattr(args, "tensor_parallel", 1)  # processes share a token's work
    return f"{text}, MFU {tokens_per_s * flops / PEAKS[name]:.0%}"
