"""README's *What two processes lose*: does a step wait for bytes, or for the other?

torchrun --standalone --nproc-per-node=2 -m benchmarks.communication
"""

import statistics

from benchmarks import limit
from benchmarks.report import table


def main():
    seconds = limit.measure(__doc__, limit.KINDS)
    if seconds is None:
        return
    rows = []
    for name, taken in seconds.items():
        pairs = zip(taken, seconds["nothing"], strict=True)
        ratio = statistics.median(one / bare for one, bare in pairs)
        middle, low, high = (
            f"{1e3 * one:.1f}"
            for one in (statistics.median(taken), min(taken), max(taken))
        )
        rows.append([name, middle, f"{low}-{high}", f"{ratio:.2f}"])
    titles = ["averaged in each step", "ms per step", "least-most", "vs nothing"]
    print("\n".join(table(titles, rows)))


if __name__ == "__main__":
    main()
