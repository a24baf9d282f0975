"""`make gpu`: run there what a CPU cannot show, in parts of some ten minutes.

python -m tools.gpu [PART ...] [--out-dir DIR] [--dry-run]

It needs torch 2.11 or later, psutil and pytest, but no internet and no Jupyter: run it
with the Python that has torch. DIR (gpu_results by default) gets what each part prints.
--dry-run only prints the parts and their commands.
"""

import argparse
import os
import re
import shlex
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from harness import commands
from harness.stages import ROOT
from harness.stages import fail
from harness.stages import features
from harness.stages import first_with
from harness.stages import plain_command
from harness.stages import reference
from harness.stages import stages
from harness.weights import max_abs_diff

SECONDS = 540  # of a command; a machine that is lent by the call often allows 600
# The parts of which several commands run at once; the others run one by one.
AT_ONCE = {"stages": 4, "nccl": 3, "nccl-words": 3}
VARIANTS = {
    "float32": "",
    "float32-again": "",
    "float64": "--dtype float64",
    "tf32": "--tf32",
    "bf16": "--amp bf16",
    "fp16": "--amp fp16",
}

# ---- the commands of each part; {few} and {all} are numbers of GPUs ------------------
FAILURES = "rank_failures checkpoint resume preemption sharded_checkpoints"
TESTS = "chain common data same_weights amp distributed_eval accumulation bad_input"
TESTS += " waits gpt fsdp tensor_parallel"
NCCL_TESTS = "same_weights amp accumulation resume preemption sharded_checkpoints"
NCCL_TESTS += " tensor_parallel"
# Of these files, tests that train on several ranks.
SEVERAL = "any_number_of_processes or any_mesh or killed_run or signal_to_any_rank"
SEVERAL += " or learns_in_mixed or clipping_is or micro_batches"
TORCHRUN = "torchrun --standalone --nproc-per-node="
YOURS = f"""
{TORCHRUN}{{all}} check_cluster.py
{TORCHRUN}{{few}} after.py
{TORCHRUN}{{few}} fsdp_resumable.py
python hugging_face/make_model.py llama
{TORCHRUN}{{few}} hugging_face/fine_tune.py llama --bf16
{TORCHRUN}{{few}} hugging_face/fine_tune.py llama --lora-rank=8
"""
BASE, AMP = first_with("images"), first_with("amp")
LARGE = "--arch resnet50 --image-size 224 --batch-size 256 --workers 4"
CIFAR = "--arch resnet18 --image-size 32 --batch-size 1024"
ONCE = "--processes 1 --device cuda"
COMPARE = f"python -m benchmarks.compare {ONCE}"
BENCHMARK = f"""
{COMPARE} {BASE} {AMP} {LARGE} --amp bf16 --json {{out}}/resnet50.json
{COMPARE} {BASE} {LARGE} --tf32 --json {{out}}/resnet50-tf32.json
{COMPARE} {BASE} {AMP} {CIFAR} --amp bf16 --json {{out}}/resnet18.json
{COMPARE} {BASE} {CIFAR} --tf32 --json {{out}}/resnet18-tf32.json
"""
# The check of a cluster names a node by this variable, if there is one.
NCCL = [
    "--no-python bash -c 'SLURMD_NODENAME=machine$RANK python check_cluster.py'",
    *("after.py", "ddp.py", "fsdp_resumable.py"),
]
WORDS = ROOT / "06_slurm/demos/nccl_words.py"


def stage_commands(out):
    """Yield the commands that train each stage in each variant that it has."""
    for stage in stages():
        for variant, flags in VARIANTS.items():
            if "--amp" in flags and "amp" not in features(stage):
                continue
            command = re.sub(" --amp .*", "", plain_command(stage, 1))
            own = f"--device cuda --epochs 2 --out-dir {out}/stages/{variant}/{stage}"
            yield f"{command} {own} {flags}"


def tests(names, more=""):
    """Return the command that runs some files of tests."""
    files = [next(ROOT.glob(f"tests/*/test_{name}.py"), name) for name in names.split()]
    options = f"-q -ra -n {min(8, os.cpu_count())} --dist worksteal --all"
    words = " ".join(str(file) for file in files)
    return f"python -m pytest {options} --device cuda {more} {words}"


def sharing(programs):
    """Yield the commands that start two ranks of nccl on one GPU for each program."""
    script = f"bash {ROOT}/recipes/nccl_on_one_gpu.sh 2"
    for number, program in enumerate(programs):
        yield f"env PORT={29600 + number} {script} {program}"


def parts(out):
    """Return {part: its commands}."""
    gpus = max(1, torch.cuda.device_count())
    numbers = {"all": gpus, "few": max(n for n in (1, 2, 4) if n <= gpus), "out": out}
    yours, benchmark = (
        text.format(**numbers).strip().split("\n") for text in (YOURS, BENCHMARK)
    )
    recipes = {*ROOT.glob("recipes/*.py")} - {ROOT / "recipes/debug_one_rank.py"}
    kinds = re.findall(r"^def (\w+)\(\):", WORDS.read_text(), re.MULTILINE)
    return {
        "machine": ["nvidia-smi", "python -m torch.utils.collect_env"],
        "stages": [*stage_commands(out)],
        "tests": [tests(TESTS)],
        "failures": [tests(FAILURES)],
        "yours": yours,
        "benchmark": benchmark,
        "probe": ["python -m benchmarks.gpu_probe"],
        "nccl": [*sharing([*NCCL, *sorted(recipes)])],
        "nccl-words": [*sharing(f"{WORDS} {kind}" for kind in kinds)],
        "nccl-tests": [tests(NCCL_TESTS, f"--ranks-per-gpu=4 -k '{SEVERAL}'")],
    }


# ---- the program ---------------------------------------------------------------------
def differences(out):
    """Yield how far each stage's weights are from the first stage's, as lines."""
    yield "the largest difference from the first stage with the same data:\n"
    for path in sorted(out.glob("stages/*/*/last.pt")):
        variant, stage = path.parts[-3:-1]
        first = out / "stages" / variant.removesuffix("-again") / reference(stage)
        away = max_abs_diff(first / "last.pt", path)
        yield f"{variant:<14} {stage:<24} {away:.1e}\n"


def run(part, found, out):
    """Run a part's commands, print and write what they print; return if all went well.

    Those of your_own_script run in a copy of its folder.
    """
    variables = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "OMP_NUM_THREADS": None}
    good = True
    with tempfile.TemporaryDirectory() as folder, (out / f"{part}.txt").open("w") as to:
        shutil.copytree(ROOT / "your_own_script", folder, dirs_exist_ok=True)
        cwd = folder if part in ("yours", "nccl", "nccl-words") else ROOT

        def start(command):
            options = {"seconds": SECONDS, "cwd": cwd, **variables}
            return commands.run(shlex.split(command), code=None, **options)

        with ThreadPoolExecutor(AT_ONCE.get(part, 1)) as pool:
            for command, done in zip(found, pool.map(start, found), strict=True):
                good &= done.returncode == 0
                ended = f"exit code {done.returncode}\n\n"
                to.write(f"$ {command}\n{done.stdout}{done.stderr}{ended}")
        if part == "stages":
            to.writelines(differences(out))
    print((out / f"{part}.txt").read_text(), end="", flush=True)
    return good


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART")
    parser.add_argument("--out-dir", type=Path, default=Path("gpu_results"))
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args()
    out = args.out_dir.resolve()
    known = parts(out)
    if unknown := sorted({*args.parts} - known.keys()):
        fail(f"there is no part {unknown[0]}; the parts are {' '.join(known)}")
    chosen = {part: known[part] for part in args.parts or known}
    if args.dry_run:
        for part, found in chosen.items():
            print(f"{part}:", *found, sep="\n  ")
        return
    if not torch.cuda.is_available():
        fail("no GPU is visible; --dry-run prints the commands")
    out.mkdir(parents=True, exist_ok=True)
    good = {part: run(part, found, out) for part, found in chosen.items()}
    for part, ended in good.items():
        print(f"{part}: ended {'as it should' if ended else 'with failures'}")
    sys.exit(not all(good.values()))


if __name__ == "__main__":
    main()
