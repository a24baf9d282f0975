"""Start a process without `if __name__ == "__main__":`.

python 04_ddp_spawn/demos/unguarded.py
"""

from multiprocessing import get_context

get_context("spawn").Process(target=print, args=["hello"]).start()
