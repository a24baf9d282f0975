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
def read_ranks(environ):
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK"]
    if "RANK" not in environ:
        names = ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"]
    return tuple(int(environ[name]) for name in names)
""",
        """
def options(nodes, gpus, cores):
    per_node = [f"--gpus-per-node={gpus}", f"--ntasks-per-node={gpus}"]
    return [f"--nodes={nodes}", *per_node, f"--cpus-per-task={cores}"]
""",
    ],
    "07_distributed_eval": [
        """
def shard(n, rank, processes):
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
def steps_needed(batch_size, processes, room):
    return -(-batch_size // (processes * room))
""",
        """
def accumulate(model, images, target):
    total = sum(map(len, target))
    for some, labels in zip(images, target):
        loss = nn.functional.cross_entropy(model(some), labels)
        (loss * len(labels) / total).backward()
""",
    ],
    "09_resume": [
        """
def latest_valid(paths, is_valid):
    return max(filter(is_valid, paths), default=None)
""",
        """
def position(step, steps, batch_size):
    epoch = (step - 1) // steps + 1
    return epoch, (step - (epoch - 1) * steps) * batch_size
""",
        """
def dealt_out(sums, rank, processes):
    return sum(sums[rank::processes])
""",
    ],
    "10_preemption": [
        """
def last_step(heard, steps):
    first = min((step for step in heard if step is not None), default=None)
    if first is None:
        return None
    return first if first % steps == 0 else first + 1
""",
        """
def run_until_told(functions):
    received = []
    signal.signal(signal.SIGUSR1, lambda number, _: received.append(number))
    for count, function in enumerate(functions, 1):
        function()
        if received:
            break
    return count
""",
    ],
}
