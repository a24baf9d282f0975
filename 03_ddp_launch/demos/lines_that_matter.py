"""Print the lines that make your_own_script/before.py run on several GPUs.

python 03_ddp_launch/demos/lines_that_matter.py

They are lines of the difference between before.py and after.py, in their order. What is
left out: imports, comments, the way without GPUs, checks, and the evaluation.
"""

import difflib
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "your_own_script"

# How a line of the difference begins, and its lines in the checklist.
WANTED = [
    ("+    local_rank, rank =", "1"),
    ("+    world_size =", "1"),
    ('+    if device.type == "cuda":', ""),
    ('+        device = torch.device("cuda"', "1"),
    ("+        torch.cuda.set_device", "2"),
    ('+        dist.init_process_group("nccl"', "3"),
    ("-    train_loader =", ""),
    ("+    local_batch_size =", "8"),
    ("+    sampler =", "5, 6"),
    ("+    train_loader =", ""),
    ("+        train_set,", "6"),
    ("+    )", ""),
    ("+    ddp_model =", "9"),
    ("     for epoch in", ""),
    ("-        train_one_epoch(", ""),
    ("+        sampler.set_epoch(", "7"),
    ("+        train_one_epoch(", "9"),
    ("-    torch.save(", ""),
    ("+    if rank == 0:", "14"),
    ("+        torch.save(", "10"),
    ("+    dist.destroy_process_group(", "3"),
]
COLORS = {"+": "32", "-": "31", " ": "0"}

before, after = (
    (FOLDER / name).read_text().splitlines() for name in ("before.py", "after.py")
)
lines = iter(list(difflib.unified_diff(before, after, n=9, lineterm=""))[2:])
for start, numbers in WANTED:
    line = next(line for line in lines if line.startswith(start))  # else StopIteration
    line = line.partition("  #")[0]
    shown = f"{line:83}# {numbers}" if numbers else line
    print(f"\x1b[{COLORS[line[0]]}m{shown}\x1b[0m")
