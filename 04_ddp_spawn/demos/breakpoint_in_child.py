"""Call breakpoint() in a spawned process.

python 04_ddp_spawn/demos/breakpoint_in_child.py
"""

from multiprocessing import get_context


def worker():
    breakpoint()
    print("resumed")


if __name__ == "__main__":
    get_context("spawn").Process(target=worker).start()
