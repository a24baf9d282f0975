"""`make gpu`: run there what a CPU cannot show, in parts of at most ten minutes.

python -m tools.gpu [PART ...] [--out-dir DIR] [--dry-run]

    machine    the GPU, the versions, and which packages are missing
    stages     every stage on one GPU, in float32, float64, bf16, fp16 and twice
    tests      the tests of the scripts, with --device cuda
    failures   the tests of dying ranks, resuming and preemption, with --device cuda
    yours      your_own_script: the check of a cluster, DDP, FSDP2, and a Llama
    benchmark  float32, TF32 and mixed precision: resnet50 on images of 224 px, and
               resnet18 on 32 px; DDP and FSDP2 with a GPT of 200 million weights
    probe      a step's variants, copies and loaders
    nccl       two ranks of nccl that share the GPU: programs and recipes by
               recipes/nccl_on_one_gpu.sh, and what nccl says when something is wrong
    nccl-tests  the tests of several ranks, up to four of which share the GPU

It needs torch 2.11 or later, psutil and pytest, but no internet and no Jupyter: run it
with the Python that has torch. DIR (gpu_results by default) gets what each part prints.
--dry-run does the same on the CPU with little work, to see that it runs.
"""

import argparse
import importlib.util
import os
import re
import shutil
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torchvision

from harness import commands
from harness.stages import ROOT
from harness.stages import command
from harness.stages import fail
from harness.stages import features
from harness.stages import first_with
from harness.stages import reference
from harness.stages import stages
from nbtools.lesson import max_abs_diff

NEEDED = ("tqdm", "numpy", "matplotlib", "pytest", "xdist", "hypothesis", "psutil")
NEEDED += ("sklearn", "PIL")
MISSING_IS_FINE = ("pytest_timeout", "nbformat", "nbval", "ruff")
SECONDS = 540  # of a part; a machine that is lent by the call often allows 600
RUN_SECONDS = 300  # of a stage or a benchmark: one that takes longer hangs
SHARED = 2  # ranks of a GPU, in the part nccl; twice as many in nccl-tests
# Of these files, the tests that train on several ranks; they take three minutes.
SEVERAL_RANKS = (
    "any_number_of_processes or any_mesh or other_meshes or all_rows or unevenly"
    " or less_precision or learns_in_mixed or clipping_is or all_ranks_skip"
    " or loss_that_is_not_finite or whole_batch_is_clipped or killed_run"
    " or (micro_batches and 08_grad) or signal_to_any_rank or different_steps"
    " or no_rank_ends or during_evaluation or unfinished or that_only_rank_1"
)
TESTS = {
    "nccl-tests": (
        *("same_weights", "amp", "accumulation", "resume", "preemption"),
        *("sharded_checkpoints", "tensor_parallel"),
    ),
    "tests": (
        *("chain", "common", "data", "same_weights", "amp", "distributed_eval"),
        *("accumulation", "bad_input", "benchmark", "waits", "gpt", "fsdp"),
        *("tensor_parallel", "recipes"),
    ),
    "failures": (
        *("rank_failures", "checkpoint", "resume", "preemption"),
        "sharded_checkpoints",
    ),
}
VARIANTS = (
    ("float32", []),
    ("float32 again", []),
    ("TF32", ["--tf32"]),
    ("float64", ["--dtype", "float64"]),
    ("bf16", ["--amp", "bf16"]),
    ("fp16", ["--amp", "fp16"]),
)
LARGE = ["--arch", "resnet50", "--image-size", "224", "--batch-size", "256"]
LARGE += ["--workers", "4"]
CIFAR = ["--arch", "resnet18", "--image-size", "32", "--batch-size", "1024"]
GPT = ["--width", "1024", "--depth", "16", "--heads", "16", "--context-length", "1024"]
GPT += ["--batch-size", "32", "--amp", "bf16"]
LITTLE_TEXT = ["--text-file", f"{first_with('text')}/train.py"]  # for --dry-run
LITTLE_TEXT += ["--width", "8", "--depth", "1"]


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=" ".join(PARTS))
    parser.add_argument("--out-dir", type=Path, default=Path("gpu_results"))
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args()
    unknown = sorted(set(args.parts) - PARTS.keys())
    if unknown:
        fail(f"there is no part {unknown[0]}; the parts are {' '.join(PARTS)}")
    if not args.dry_run and not torch.cuda.is_available():
        fail("no GPU is visible; --dry-run does without one")
    args.device = "cpu" if args.dry_run else "cuda"
    args.parts = args.parts or list(PARTS)
    args.out_dir.mkdir(parents=True, exist_ok=True)
    return args


def reporter(path):
    """Return a function that prints a text, and writes it to a file as well."""
    path.write_text("")

    def report(text):
        print(text, flush=True)
        with path.open("a") as file:
            file.write(f"{text}\n")

    return report


def run(words, seconds, cwd=ROOT):
    """Run a command, at most so long; return its exit code, or "hung", and output.

    The number of threads is left to the command.
    """
    variables = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    variables["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS")
    done = commands.run(words, code=None, seconds=seconds, cwd=cwd, **variables)
    return done.returncode, done.stdout + done.stderr


def machine(args, report):
    """Report the GPU and the versions; return whether all that is needed is there."""
    report(f"--device {args.device}")
    report(f"torch {torch.__version__}, torchvision {torchvision.__version__}")
    report(f"Python {sys.version.split()[0]}, {os.cpu_count()} cores")
    for number in range(torch.cuda.device_count()):
        report(f"GPU {number}: {torch.cuda.get_device_name(number)}")
    if torch.cuda.is_available():
        report(
            f"cuDNN {torch.backends.cudnn.version()}, NCCL {torch.cuda.nccl.version()}"
        )
    for name in (*NEEDED, *MISSING_IS_FINE):
        if importlib.util.find_spec(name) is None:
            report(f"missing: {name}{' (needed)' if name in NEEDED else ''}")
    return all(map(importlib.util.find_spec, NEEDED))


def train_stages(args, report):
    """Train each stage in each variant; compare the weights with stage 01's."""
    flags = ["--device", args.device, "--epochs", "1" if args.dry_run else "2"]
    chosen = [
        (stage, variant, own)
        for stage in stages()
        for variant, own in VARIANTS
        if "--amp" not in own or "amp" in features(stage)
    ]
    if args.dry_run:
        chosen = [*chosen[:2], chosen[-1]]
        chosen = [
            (stage, variant, own + (LITTLE_TEXT if "text" in features(stage) else []))
            for stage, variant, own in chosen
        ]
    good, first = True, {}

    def train(stage, own, out_dir):
        begin = time.perf_counter()
        words = [*command(stage), *flags]
        if "--amp" in words:  # some commands have it, but not every variant
            words += ["--amp", "off"]
        done = run([*words, *own, "--out-dir", str(out_dir)], RUN_SECONDS)
        return *done, time.perf_counter() - begin

    report(f"{'stage':<22} {'variant':<14} {'exit code':>9} {'s':>6} {'vs first':>9}")
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(4) as pool:
        folders = [Path(folder, f"{stage} {variant}") for stage, variant, _ in chosen]
        runs = [
            pool.submit(train, stage, own, out_dir)
            for (stage, _, own), out_dir in zip(chosen, folders, strict=True)
        ]
        for (stage, variant, _), out_dir, future in zip(
            chosen, folders, runs, strict=True
        ):
            code, text, seconds = future.result()
            good &= code == 0
            away = ""
            if code == 0:
                last = out_dir / "last.pt"
                key = (variant.split()[0], reference(stage))
                away = f"{max_abs_diff(first.setdefault(key, last), last):.1e}"
            report(f"{stage:<22} {variant:<14} {code:>9} {seconds:>6.1f} {away:>9}")
            if code:
                report(text[-2000:])
    report(
        "vs first: the largest difference to the weights of the first stage of this"
        " variant that trains on the same data. Four runs share the GPU, so the seconds"
        " are no measure of speed."
    )
    return good


def summarize(path, report):
    """Report the counts in a JUnit file, and which tests failed and were skipped."""
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        kinds = {child.tag: child for child in case}
        wrong = kinds.get("failure", kinds.get("error"))
        name = f"{case.get('classname').rpartition('.')[2]}::{case.get('name')}"
        if wrong is not None:
            counts["failed"] += 1
            report(
                f"failed: {name}: {' '.join(wrong.get('message', '').split())[:200]}"
            )
        elif "skipped" in kinds:
            counts["skipped"] += 1
        else:
            counts["passed"] += 1
    report(", ".join(f"{number} {kind}" for kind, number in counts.items()))
    return counts


def run_tests(part, args, report, more=()):
    """Run the test files of a part, with more options; return whether none failed."""
    junit = args.out_dir / f"{part}.xml"
    junit.unlink(missing_ok=True)
    files = [str(next(ROOT.glob(f"tests/*/test_{name}.py"))) for name in TESTS[part]]
    # Nothing of a file that needs Jupyter is imported; what has no GPU to run on skips.
    options = ["-q", "-n", str(min(8, os.cpu_count())), "--dist", "worksteal"]
    options += ["-p", "no:cacheprovider", "--device", args.device, "--all"]
    options += more
    if args.dry_run:
        files, options = ["tests/stages/test_common.py"], [*options, "-k", "meter"]
    words = ["python", "-m", "pytest", *options, f"--junitxml={junit}", *files]
    code, text = run(words, SECONDS)
    (args.out_dir / f"{part}.log").write_text(text)
    report(f"pytest: exit code {code}")
    if not junit.exists():
        report(text[-3000:])
        return False
    return summarize(junit, report)["passed"] > 0 and code == 0


def benchmark(args, report):
    """Run the benchmark on three kinds of work; return whether it ran.

    On one H100, ResNet-50 in float32 and bf16 took 94 seconds, and the GPT 116.
    """
    good = True
    works = {"resnet50": LARGE, "resnet18": CIFAR}
    single, amp = first_with("images"), first_with("amp")
    variants = {
        "float32-and-bf16": ([single, amp], ["--amp", "bf16"]),
        "TF32": ([single], ["--tf32"]),
    }
    if args.dry_run:
        works = {"small": ["--image-size", "8", "--batch-size", "12"]}
        variants = {"float32": ([single], [])}
    once = ["--processes", "1"]
    for name, flags in works.items():
        for variant, (chosen, own) in variants.items():
            path = args.out_dir / f"benchmark-{name}-{variant}.json"
            words = [*chosen, *once, *flags, *own, "--device", args.device]
            start = ["python", "-m", "benchmarks.compare"]
            code, text = run(
                [*start, *words, "--json", str(path.resolve())], RUN_SECONDS
            )
            good &= code == 0
            report(f"\n{name}, {variant}: exit code {code}")
            report(text)
    flags = ["--width", "8", "--epochs", "2"] if args.dry_run else GPT
    path = args.out_dir / "benchmark-gpt.json"
    words = [first_with("text"), first_with("shards"), *flags]
    words += [*once, "--device", args.device]
    start = ["python", "-m", "benchmarks.compare_text", *words]
    code, text = run([*start, "--json", str(path.resolve())], RUN_SECONDS)
    good &= code == 0
    report(f"\nGPT: exit code {code}\n{text}")
    return good


def probe(args, report):
    """Run benchmarks/gpu_probe.py; return whether it ended well."""
    words = ["python", "-m", "benchmarks.gpu_probe"]
    code, text = run([*words, *(["--dry-run"] if args.dry_run else [])], SECONDS)
    report(f"probe: exit code {code}")
    report(text)
    return code == 0


def run_yours(args, report):
    """Run the programs that one copies; return whether they ended well.

    The check on all GPUs, the others on as many as divide their batches.
    """
    gpus = max(1, torch.cuda.device_count())
    few = max(number for number in (1, 2, 4) if number <= gpus)
    launch = ["torchrun", "--standalone", f"--nproc-per-node={few}"]
    programs = [
        [*launch[:2], f"--nproc-per-node={gpus}", "check_cluster.py"],
        [*launch, "after.py"],
        [*launch, "fsdp_resumable.py"],
        ["python", "hugging_face/make_model.py", "llama"],
        [*launch, "hugging_face/fine_tune.py", "llama", "--bf16"],
        [*launch, "hugging_face/fine_tune.py", "llama", "--lora-rank=8"],
    ]
    if importlib.util.find_spec("transformers") is None:
        report("missing: transformers, so nothing of hugging_face/ is run")
        programs = [each for each in programs if "hugging_face" not in " ".join(each)]
    good = True
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "your_own_script", folder, dirs_exist_ok=True)
        for words in programs[: 2 if args.dry_run else None]:
            code, text = run(words, RUN_SECONDS, cwd=folder)
            good &= code == 0
            report(f"\n{' '.join(words)}: exit code {code}\n{text}")
    return good


WORDS = "06_slurm/demos/nccl_words.py"  # a program of mistakes
# What recipes need that is not in requirements.txt.
EXTRA = {"float8_fsdp": "torchao", "stateful_loader": "torchdata"}
# The check names a node by this variable, if there is one.
CHECK = "SLURMD_NODENAME=machine$RANK python check_cluster.py"
PROGRAMS = (
    [str(ROOT / "06_slurm/demos/smoke_test.py")],
    ["--no-python", "bash", "-c", CHECK],
    ["after.py"],
    ["ddp.py"],
    ["fsdp_resumable.py"],
    ["hugging_face/fine_tune.py", "llama", "--bf16"],
)
# Beside frozen weights, FSDP2 of torch 2.11 to 2.14 could gather wrong ones.
LORA = ["hugging_face/fine_tune.py", "llama", "--lora-rank=8", "--epochs=2", "--out"]


def report_adapters(folder, report):
    """Report how far the adapters of several ranks are from those of one process."""
    name = "adapter_model.safetensors"
    paths = [Path(folder, one, name) for one in ("one", "several")]
    if all(path.exists() for path in paths):
        from safetensors.torch import load_file  # there, as fine_tune.py wrote them

        one, other = map(load_file, paths)
        away = max((one[name] - other[name]).abs().max().item() for name in one)
        report(f"\nadapters of {SHARED} ranks: {away:.1e} from one process")


def run_nccl(args, report):
    """Run programs with ranks that share the GPU, each as if alone on its machine.

    Return whether your_own_script's and the recipes ended well. What nccl says of the
    mistakes is for a reader: docs/symptoms.md quotes it.
    """
    recipes = {*ROOT.glob("recipes/*.py")}
    recipes.discard(ROOT / "recipes/debug_one_rank.py")  # needs a terminal
    for name, package in EXTRA.items():
        if importlib.util.find_spec(package) is None:
            report(f"missing: {package}, so recipes/{name}.py is not run")
            recipes.discard(ROOT / f"recipes/{name}.py")
    kinds = re.findall(r"^def (\w+)\(\):", (ROOT / WORDS).read_text(), re.MULTILINE)
    good = [*PROGRAMS, *([str(each)] for each in sorted(recipes))]
    mistakes = [[str(ROOT / WORDS), kind] for kind in kinds]
    if args.dry_run:
        good, mistakes = good[:2], mistakes[-1:]
    hidden = ["CUDA_VISIBLE_DEVICES="] if args.dry_run else []
    script = ["bash", str(ROOT / "recipes/nccl_on_one_gpu.sh"), str(SHARED)]
    # More than three would often wait for their turn on the GPU.
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(3) as pool:
        shutil.copytree(ROOT / "your_own_script", folder, dirs_exist_ok=True)
        if not args.dry_run:
            run(["python", "hugging_face/make_model.py", "llama"], 60, cwd=folder)
            run(["torchrun", "--standalone", *LORA, "one"], 150, cwd=folder)
            good.append([*LORA, "several"])
        runs = []
        for number, words in enumerate([*good, *mistakes]):
            own = ["env", f"PORT={29600 + number}", *hidden, *script, *words]
            runs.append(pool.submit(run, own, 150, cwd=folder))
        codes = []
        for words, future in zip([*good, *mistakes], runs, strict=True):
            code, text = future.result()
            codes.append(code)
            shown = " ".join(words).replace(f"{ROOT}/", "")
            report(f"\n{shown}: exit code {code}\n{text}")
        report_adapters(folder, report)
    return not any(codes[: len(good)])


def run_nccl_tests(args, report):
    """Run the tests of the part `nccl-tests`; return whether none failed."""
    options = [f"--ranks-per-gpu={2 * SHARED}"]
    if not args.dry_run:
        options += ["-k", SEVERAL_RANKS]
    return run_tests("nccl-tests", args, report, options)


PARTS = {
    "machine": machine,
    "stages": train_stages,
    "tests": lambda *args: run_tests("tests", *args),
    "failures": lambda *args: run_tests("failures", *args),
    "yours": run_yours,
    "benchmark": benchmark,
    "probe": probe,
    "nccl": run_nccl,
    "nccl-tests": run_nccl_tests,
}


def main():
    args = parse_args()
    results = {}
    for part in args.parts:
        report = reporter(args.out_dir / f"{part}.txt")
        begin = time.perf_counter()
        results[part] = PARTS[part](args, report)
        end = "as it should" if results[part] else "with failures"
        report(f"{part}: ended {end} after {time.perf_counter() - begin:.0f} s")
    sys.exit(0 if all(results.values()) else 1)


if __name__ == "__main__":
    main()
