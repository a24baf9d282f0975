"""`make steps`: a training step of some stages as each rank took it, for the site.

Each stage trains on CPUs until its third optimizer step has ended. What happens after
the second one is recorded (in the second, DDP still decides on its buckets): the module
that has computed, or the collective, the ranks that take part, the bytes that this rank
gives and those of the whole; the line of train.py; and what the rank then holds.

python -m tools.record_steps
"""

import json
import os
import runpy
import sys
import tempfile
import weakref
from pathlib import Path

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as hooks
from torch.optim.optimizer import register_optimizer_step_post_hook

from harness import commands
from harness.counting import Collectives
from harness.stages import ROOT
from harness.stages import first_with
from tools import stale

PAGE = ROOT / "tools/site/steps.json"
BEFORE = 2  # steps
SMALL = "--width 64 --depth 2 --heads 4 --context-length 16 --batch-size 8"
# a stage: its processes, and flags that make its model small
RUNS = {
    first_with("ddp"): (2, "--arch resnet18"),
    first_with("shards"): (2, SMALL),
    first_with("tensor_parallel"): (4, f"{SMALL} --tensor-parallel 2"),
}


def storage(tensor):
    """Return the memory of a tensor: of a sharded one, that of this rank's shard."""
    tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return tensor.untyped_storage()


def size(tensors):
    """Return the bytes of some tensors' memory, each memory once."""
    storages = {each.data_ptr(): each.nbytes() for each in map(storage, tensors)}
    return sum(storages.values())


def group_of(arguments):
    """Return the ranks that take part in a collective."""
    for each in reversed(arguments):
        if isinstance(each, torch.ScriptObject) and "ProcessGroup" in str(each._type()):
            return dist.get_process_group_ranks(dist.ProcessGroup.unbox(each))
        if isinstance(each, str):  # DTensor's have the name of the group at the end
            group = dist.distributed_c10d._resolve_process_group(each)
            return dist.get_process_group_ranks(group)
    return list(range(dist.get_world_size()))


class Recorder(Collectives):
    """Notes one step of the program that this process runs, in `events`."""

    def __init__(self, script):
        super().__init__()
        self.script, self.events, self.names = str(script), None, {}
        self.model, self.optimizer, self.depth = None, None, 0
        self.saved, self.steps = {}, 0
        hooks.register_module_forward_pre_hook(self.enter)
        hooks.register_module_forward_hook(self.computed)
        register_optimizer_step_post_hook(self.after_step)

    # ---- what happens ----
    def enter(self, module, _):
        if self.depth == 0 and module is not self.model:
            self.model = module
            inner = getattr(module, "module", module)  # DDP's own
            for name, child in inner.named_children():
                listed = isinstance(child, nn.ModuleList)
                found = child.named_children() if listed else [("", child)]
                for part, each in found:
                    self.names[each] = f"{name}.{part}".rstrip(".")
        self.depth += 1

    def computed(self, module, _, output):
        self.depth -= 1
        # one that computes nothing, such as the maxpool of small images, is no moment
        computes = not isinstance(module, nn.Identity)
        if module in self.names and computes and output.requires_grad:
            name = self.names[module]
            self.add("forward", name)
            output.register_hook(lambda _: self.add("backward", name))

    def note(self, operation, args, result):
        seen = len(self.seen)
        super().note(operation, args, result)
        for name, _, given, whole in self.seen[seen:]:
            self.add(name, group_of(args), given, whole)

    def after_step(self, optimizer, *_):
        self.steps += 1
        self.optimizer = optimizer
        if self.steps == BEFORE:
            self.events = []
            torch.autograd.graph.saved_tensors_hooks(self.save, lambda x: x).__enter__()
            self.__enter__()
        elif self.steps == BEFORE + 1:
            self.add("optimizer", "step")
            self.__exit__(None, None, None)
            self.finish()

    def save(self, tensor):
        memory = storage(tensor)
        self.saved[id(memory)] = weakref.ref(memory)
        return tensor

    # ---- what is written down ----
    def add(self, what, *others):
        if self.events is not None:
            self.events.append([what, *others, self.line(), self.holds()])

    def line(self):
        """Return the line of the script that is running, counted from 1."""
        frame = sys._getframe()
        while frame and frame.f_code.co_filename != self.script:
            frame = frame.f_back
        return frame.f_lineno if frame else None

    def holds(self):
        """Return the bytes of what this rank holds, by kind."""
        states = [
            each for state in self.optimizer.state.values() for each in state.values()
        ]
        own, whole = list(self.model.parameters()), []
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                group = module._get_fsdp_state()._fsdp_param_group
                for each in group.fsdp_params if group else ():
                    own.append(each.sharded_param)
                    if hasattr(each, "_unsharded_param"):
                        whole.append(each._unsharded_param)
        gathered = {storage(each).data_ptr() for each in whole}
        own = [each for each in own if storage(each).data_ptr() not in gathered]
        gradients = [w.grad for w in [*own, *whole] if w.grad is not None]
        known = {storage(each).data_ptr() for each in [*own, *whole]}
        alive = [memory for each in self.saved.values() if (memory := each())]
        alive = {m.data_ptr(): m.nbytes() for m in alive if m.data_ptr() not in known}
        return {
            "weights": size(own),
            "gathered": size(whole),
            "gradients": size(gradients),
            "optimizer": size([each for each in states if each.numel() > 1]),
            "activations": sum(alive.values()),
        }

    def finish(self):
        """Write what this rank has noted, and end the run."""
        events, self.events = self.events, None
        path = Path(os.environ["RECORDED"], f"{dist.get_rank()}.json")
        path.write_text(json.dumps(events))
        dist.barrier()
        os._exit(0)


def record(stage, folder):
    """Return the events of each rank of a stage, in a list."""
    processes, flags = RUNS[stage]
    command = [
        *("torchrun", "--standalone", f"--nproc-per-node={processes}"),
        *("-m", "tools.record_steps", stage, "--device", "cpu", *flags.split()),
    ]
    commands.run(command, folder / "out", RECORDED=folder, cwd=ROOT)
    files = [folder / f"{rank}.json" for rank in range(processes)]
    return [json.loads(file.read_text()) for file in files]


def made_from():
    """Return the digest of what the steps are recorded from."""
    scripts = [ROOT / stage / "train.py" for stage in RUNS]
    return stale.digest([Path(__file__).read_text()], scripts)


def run_rank(stage, flags):
    """Run a stage in this process, and end it after the recorded step."""
    script = ROOT / stage / "train.py"
    Recorder(script)
    sys.argv = [str(script), *flags]
    sys.path[0] = str(script.parent)
    runpy.run_path(str(script), run_name="__main__")


def main():
    recorded = {}
    for stage in RUNS:
        with tempfile.TemporaryDirectory() as folder:
            recorded[stage] = record(stage, Path(folder))
            print(stage, [len(each) for each in recorded[stage]])
    recorded = {"made_from": made_from(), "steps": recorded}
    PAGE.write_text(json.dumps(recorded, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    if sys.argv[1:]:
        stage, *flags = sys.argv[1:]
        run_rank(stage, flags)
    main()
