"""Fork a process after torch has used two threads, then spawn one for comparison.

python 04_ddp_spawn/demos/fork_after_threads.py
"""

from multiprocessing import get_context

import torch


def work():
    torch.set_num_threads(2)
    torch.rand(1_000_000).exp()  # large enough for both threads


if __name__ == "__main__":
    work()  # this starts the threads, here in the parent
    for method, seconds in (("fork", 5), ("spawn", 120)):
        child = get_context(method).Process(target=work)
        child.start()
        child.join(seconds)
        hangs = child.is_alive()
        print(f"{method}: {f'hangs, killed after {seconds} s' if hangs else 'done'}")
        child.kill()
