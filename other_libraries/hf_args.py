"""The flags of hf_accelerate.py, hf_trainer.py and hf_distributed_config.py."""

import argparse
import os
from pathlib import Path


def parse_args(description, least_processes=1):
    """Return the flags, which are some of fine_tune.py's, and `processes`, how many.

    Ends the program with one line on standard error and exit code 2 if a flag is wrong,
    or if it was not started by torchrun with at least so many processes.
    """
    parser = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage=argparse.SUPPRESS,
    )
    parser.add_argument("model", type=Path, help="config.json and *.safetensors")
    parser.add_argument("--out", type=Path, default=Path("tuned"))
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=24)
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16")
    dtypes = ("float32", "bfloat16", "float64")
    parser.add_argument("--dtype", choices=dtypes, default="float32")
    args = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        parser.error("run this program with torchrun --standalone --nproc-per-node=N")
    args.processes = int(os.environ["WORLD_SIZE"])
    if args.processes < least_processes:
        parser.error(f"start at least {least_processes} processes")
    if args.batch_size % (args.processes * args.micro_batches):
        parser.error("--batch-size must be divisible by processes * --micro-batches")
    if not list(args.model.glob("*.safetensors")):
        parser.error(f"there is no *.safetensors in {args.model}")
    return args
