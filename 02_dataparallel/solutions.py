"""Solutions of the exercises in 02_dataparallel.ipynb."""


# ---- exercise 1 ----------------------------------------------------------------------
def without_prefix(state_dict):
    return {name.removeprefix("module."): tensor for name, tensor in state_dict.items()}


# ---- exercise 2 ----------------------------------------------------------------------
def images_per_gpu(batch_size, gpus):
    share = -(-batch_size // gpus)
    return [min(share, batch_size - start) for start in range(0, batch_size, share)]
