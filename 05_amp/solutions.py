"""Solutions of the exercises in 05_amp.ipynb."""


# ---- exercise 1 ----------------------------------------------------------------------
def smallest_scale(gradient):
    scale = 1
    while ((gradient * scale).half() == 0).sum() > (gradient == 0).sum():
        scale *= 2
    return scale


# ---- exercise 2 ----------------------------------------------------------------------
# Each optimizer skips its own step only: the second one takes its step.
def step(loss, optimizers, scaler):
    for optimizer in optimizers:
        optimizer.zero_grad()
    scaler.scale(loss).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()  # once, after all of them
