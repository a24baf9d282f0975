"""Solutions of the notebooks' exercises: each stage's, in order."""

SOLUTIONS = {
    "01_single_gpu": [
        """
def mean_loss(losses, sizes):
    return sum(loss * size for loss, size in zip(losses, sizes)) / sum(sizes)
""",
        """
def first_batch(n, seed, e, batch_size):
    generator = torch.Generator().manual_seed(seed + e)
    return torch.randperm(n, generator=generator)[:batch_size].tolist()
""",
    ],
    "02_dataparallel": [
        """
def without_prefix(state_dict):
    return {name.removeprefix("module."): tensor for name, tensor in state_dict.items()}
""",
        """
def images_per_gpu(batch_size, gpus):
    share = -(-batch_size // gpus)
    return [min(share, batch_size - start) for start in range(0, batch_size, share)]
""",
    ],
    "03_ddp_launch": [
        """
def dealt(order, rank, processes):
    return order[rank : len(order) // processes * processes : processes]
""",
        """
def same_training(gpus, batch_per_gpu, learning_rate):
    return gpus * batch_per_gpu, learning_rate
""",
    ],
    "04_ddp_spawn": [
        """
def threads(cores, processes):
    return str(max(1, cores // processes))
""",
        '''
def worker_file(folder):
    return f"""
from pathlib import Path

def work(rank):
    Path({folder!r}, str(rank)).touch()
"""
''',
    ],
    "05_amp": [
        """
def smallest_scale(gradient):
    scale = 1
    while ((gradient * scale).half() == 0).sum() > (gradient == 0).sum():
        scale *= 2
    return scale
""",
        """
def step(loss, parameters, optimizer, scaler, clip):
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(parameters, clip)
    scaler.step(optimizer)
    scaler.update()
""",
    ],
    "06_slurm": [
        """
def place(environ):
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK"]
    if "RANK" not in environ:
        names = ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"]
    return tuple(int(environ[name]) for name in names)
""",
        """
def options(nodes, gpus, cores):
    each = [f"--gpus-per-node={gpus}", f"--ntasks-per-node={gpus}", f"--cpus-per-task={cores}"]
    return [f"--nodes={nodes}", *each]
""",
    ],
    "07_distributed_eval": [
        """
def part(n, rank, processes):
    return list(range(rank, n, processes))
""",
        """
def add_up(errors_of_each_process):
    sent = [(sum(map(abs, errors)), len(errors)) for errors in errors_of_each_process]
    return sum(total for total, _ in sent) / sum(count for _, count in sent)
""",
    ],
    "08_grad_accumulation": [
        """
def parts_needed(batch_size, processes, room):
    return -(-batch_size // (processes * room))
""",
        """
def accumulate(model, images, target):
    total = sum(map(len, target))
    for some, labels in zip(images, target):
        (nn.functional.cross_entropy(model(some), labels) * len(labels) / total).backward()
""",
    ],
    "10_preemption": [
        """
def to_go_on(paths, whole):
    return max(filter(whole, paths), default=None)
""",
        """
def place(step, steps, batch_size):
    epoch = (step - 1) // steps + 1
    return epoch, (step - (epoch - 1) * steps) * batch_size
""",
        """
def last_step(heard):
    return min((step for step in heard if step is not None), default=None)
""",
    ],
}
