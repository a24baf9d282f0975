"""Solutions of the exercises in 03_ddp_launch.ipynb."""

# ---- exercise 1 ----------------------------------------------------------------------
# The first calls of the two ranks belong together, and so do the second ones: 1 + 20,
# then 10 + 2. Nothing hangs, because both ranks make two calls of the same kind.
prediction = {0: (21, 12), 1: (12, 21)}


# ---- exercise 2 ----------------------------------------------------------------------
# DDP notes at its construction which parameters require a gradient, and averages those.
# The backbone's come later. So wrap the model again; or wrap it before anything is
# frozen, with find_unused_parameters=True.
bug = "        backbone.requires_grad_(True)\n"
repair = f"{bug}        wrapped = DistributedDataParallel(model)\n"


# ---- exercise 3 ----------------------------------------------------------------------
# The lines 1, 3, 5, 6, 8, 9, 10 and 14 of the checklist. There is no GPU to choose, and
# the sampler does not shuffle, because the loader did not.
converted = "03_ddp_launch/demos/convert_solution.py"


# ---- mistakes exercise 1 -------------------------------------------------------------
# DDP averages the ranks' gradients, so it divides by their number. A sum that a rank
# divides by the global batch is divided twice: divide by the samples of this rank.
bug = "/ batch_size\n"
repair = "/ len(x)\n"
