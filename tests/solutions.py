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
}
