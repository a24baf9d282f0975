"""Find the modules of any model that are worth a group of FSDP2, by their size.

python 12_fsdp/demos/find_groups.py
"""

import sys
from pathlib import Path

import torch
import torchvision
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common.gpt import GPT


# ---- to copy -------------------------------------------------------------------------
def find_groups(module, most, least):
    """Return modules with `least` to `most` weights each, the largest such.

    One that is larger and has no such parts is returned as it is: an embedding, say.
    The root of the model takes what is in none of them.
    """
    groups = []
    for child in module.children():
        size = sum(weight.numel() for weight in child.parameters())
        has_forward = type(child).forward is not nn.Module.forward  # not a ModuleList
        if size < least:
            continue
        parts = []
        if size > most or not has_forward:
            parts = find_groups(child, most, least)
        groups += parts or ([child] if has_forward else [])
    return groups


# ---- what it finds -------------------------------------------------------------------
def main():
    with torch.device("meta"):
        models = [
            torchvision.models.vit_b_16(),
            torchvision.models.resnet50(),
            torchvision.models.segmentation.deeplabv3_resnet50(weights_backbone=None),
            nn.Transformer(),
            GPT(32_000, 512, width=512, depth=6),
        ]
    for model in models:
        total = sum(weight.numel() for weight in model.parameters())
        groups = find_groups(model, most=total / 8, least=total / 100)
        sizes = [sum(weight.numel() for weight in g.parameters()) for g in groups]
        names = {type(group).__name__: 0 for group in groups}
        for group in groups:
            names[type(group).__name__] += 1
        text = ", ".join(f"{count} {name}" for name, count in names.items())
        print(f"{type(model).__name__}, {total / 1e6:.0f} million weights: {text}")
        print(f"  largest {max(sizes):,}, in the root {total - sum(sizes):,}")


if __name__ == "__main__":
    main()
