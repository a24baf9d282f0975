"""Read the weights of a sharded checkpoint in one process, and write them as one file.

python 13_sharded_checkpoints/demos/to_one_file.py FOLDER FILE.pt|FILE.safetensors
"""

import sys

import torch
import torch.distributed.checkpoint as dcp

folder, file = sys.argv[1:]
saved = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
prefix = "app.model."  # dcp.save got {"app": ...}, whose state_dict() has "model"
weights = {
    name: torch.empty(each.size, dtype=each.properties.dtype)
    for name, each in saved.items()
    if name.startswith(prefix)
}
dcp.load(weights, checkpoint_id=folder)  # fills these tensors, and reads nothing else
weights = {name.removeprefix(prefix): each for name, each in weights.items()}
if file.endswith(".safetensors"):
    from safetensors.torch import save_file  # pip install safetensors

    save_file(weights, file, metadata={"format": "pt"})
else:
    torch.save(weights, file)
