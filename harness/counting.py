"""Count what a block of code does: waits for the device, collectives, and memory.

    with Collectives() as collectives, Waits() as waits:
        train_one_step()
    waits.count                          # 1
    collectives.seen                     # [("all_reduce", torch.float32, 400, 400)]
    collectives.total()["all_reduce"]    # {"calls": 1, "bytes": 400}
    collectives.sent                     # 400.0, in a ring of two
    with Kept() as kept, Memory() as memory:
        loss = model(inputs).sum()
    size(kept.activations(model))        # bytes that wait for the backward pass
    memory.most                          # bytes that were there at once

Except for Kept, they are dispatch modes: torch shows them each operation. They see
those of the thread that entered them, and of the backward passes that it starts, on a
CPU or a GPU: so also the all-reduces of DDP, and the all-gathers and reduce-scatters of
FSDP2. They do not see those of other threads, such as an asynchronous save's. What a
backend makes of a collective does not matter: gloo carries out a reduce-scatter as an
all-reduce, and it is seen as a reduce-scatter.
"""

import itertools
import time
import weakref

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
# Python needs a number that the device computes, or the size of a result.
WAITING = {aten._local_scalar_dense.default, aten.nonzero.default, aten.equal.default}
COPIES = {aten._to_copy.default, aten.copy_.default}

# Operations have names such as allreduce_, _allgather_base_ and all_gather_into_tensor.
# The first of these whose letters are in such a name is the collective.
COLLECTIVES = ("all_gather", "all_reduce", "all_to_all", "reduce_scatter", "broadcast")
COLLECTIVES += ("barrier", "gather", "scatter", "reduce", "send", "recv")
# Around a ring of n, each rank sends (n - 1) / n of the whole so many times; in a
# broadcast on average, since the last rank sends nothing.
AROUND = {"all_gather": 1, "reduce_scatter": 1, "broadcast": 1, "all_reduce": 2}


class Count(TorchDispatchMode):
    """Calls `note(operation, arguments, result)` for each operation on plain tensors.

    One on a DTensor is seen as what DTensor makes of it: collectives and operations on
    this process's shards.
    """

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # DTensor is next, and calls us with plain tensors
        result = operation(*args, **(kwargs or {}))
        self.note(operation, args, result)
        return result


class Waits(Count):
    """Counts the operations that make Python wait for the device, in `count`.

    They are the same on a CPU, where Python waits for every operation anyway; but only
    with a GPU are copies between the two counted, those that wait.
    """

    count = 0

    def note(self, operation, args, result):
        if operation in WAITING:
            self.count += 1
        if operation in COPIES:
            source = args[1] if operation is aten.copy_.default else args[0]
            devices = {source.device.type, result.device.type}
            pinned = source.device.type == "cpu" and source.is_pinned()
            self.count += devices == {"cpu", "cuda"} and not pinned


class WaitsForDevice(Waits):
    """Counts the same, except that AdamW reads how many steps it has taken.

    It keeps that number for each weight, in a tensor that is on the CPU even if the
    weight is on a GPU.
    """

    numbers = frozenset()

    def __init__(self):
        super().__init__()
        register_optimizer_step_pre_hook(self.find_numbers)

    def find_numbers(self, optimizer, *_):
        states = optimizer.state.values()
        self.numbers = {id(state["step"]) for state in states if "step" in state}

    def note(self, operation, args, result):
        if not args or id(args[0]) not in self.numbers:
            super().note(operation, args, result)


class Collectives(Count):
    """Notes the collectives that this process calls, in `seen`.

    seen: a tuple for each, in order: its name as in torch.distributed ("all_gather",
    "reduce_scatter", ...); the dtype; the bytes that this process gives to it; and the
    bytes of the whole, which for an all-gather is its result, for most others the same.
    A barrier has 0 bytes. The tuples are plain, so that torch.load reads them.
    sent: the bytes that this process sends in those of AROUND, if its groups are rings.
    """

    def __init__(self):
        super().__init__()
        self.seen, self.sent = [], 0.0

    def note(self, operation, args, result):
        if name := collective_of(operation):
            self.seen.append((name, *sizes(name, args, result)))
            if name in AROUND:
                n = group_of(args).size()
                self.sent += AROUND[name] * self.seen[-1][-1] * (n - 1) / n

    def total(self):
        """Return {name: {"calls": their number, "bytes": given by this process}}."""
        found = {}
        for name, _, given, _ in self.seen:
            sums = found.setdefault(name, {"calls": 0, "bytes": 0})
            sums["calls"] += 1
            sums["bytes"] += given
        return found


def collective_of(operation):
    """Return the name in torch.distributed of a collective, or None of what is none."""
    # c10d: of torch.distributed, DDP and FSDP2; the other: of DTensor
    if operation.namespace not in ("c10d", "_c10d_functional"):
        return None
    letters = operation.__name__.replace("_", "")
    return next((n for n in COLLECTIVES if n.replace("_", "") in letters), None)


def group_of(args):
    """Return the process group among a collective's arguments; DTensor gives a name."""
    for one in args:
        if isinstance(one, torch.ScriptObject) and "ProcessGroup" in str(one._type()):
            return dist.ProcessGroup.unbox(one)
    return _resolve_process_group(args[-1])


def tensors_of(args):
    """Return the lists of tensors among the arguments: what is given comes last."""
    groups = [list(filter(torch.is_tensor, tree_leaves(each))) for each in args]
    return [group for group in groups if group]


def sizes(name, args, result):
    """Return the dtype of a collective, the bytes of its input, and of the whole."""
    # of the parameters, the output if there is one, then the input; then the result
    inputs, results = tensors_of(args), tensors_of([result])
    if name == "barrier" or not inputs:
        return None, 0, 0
    sums = [sum(tensor.nbytes for tensor in group) for group in inputs + results]
    return inputs[-1][0].dtype, sums[len(inputs) - 1], max(sums)


def between_steps(first, last, begin, end):
    """Have this process call `begin` and `end`, each after one of its optimizer steps.

    first, last: counted from 1, over all optimizers of the process.
    """
    steps = itertools.count(1)
    calls = {first: begin, last: end}

    def after_step(*_):
        if call := calls.get(next(steps)):
            call()

    register_optimizer_step_post_hook(after_step)


# ---- memory --------------------------------------------------------------------------
def local(tensors):
    """Return this process's own tensors: the shards of those that are sharded."""
    return [each.to_local() if isinstance(each, DTensor) else each for each in tensors]


def size(tensors):
    """Return the bytes of the memory of this process's tensors, each memory once."""
    storages = [each.untyped_storage() for each in local(tensors)]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


class Kept(torch.autograd.graph.saved_tensors_hooks):
    """Collects in `tensors` what autograd keeps of forward passes for the backward."""

    def __init__(self):
        self.tensors = []
        super().__init__(self.keep, lambda tensor: tensor)

    def __enter__(self):
        super().__enter__()
        return self

    def keep(self, tensor):
        self.tensors.append(tensor)
        return tensor

    def activations(self, model):
        """Return those that are not a model's weights; ask before the backward pass.

        A weight that FSDP2 has gathered and freed again has no bytes.
        """

        def place(tensor):
            return tensor.untyped_storage().data_ptr()

        weights = set(map(place, local(model.parameters())))
        return [each for each in local(self.tensors) if place(each) not in weights]


class Memory(TorchDispatchMode):
    """Notes in `most` the most bytes of plain tensors that are alive at once.

    tensors: some that are there at the beginning. Those on the meta device have none.
    """

    def __init__(self, tensors=()):
        super().__init__()
        self.storages, self.most = {}, 0
        self.see(local(tensors))

    def see(self, tensors):
        for tensor in tensors:
            if type(tensor) in (torch.Tensor, nn.Parameter) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                self.storages[id(storage)] = weakref.ref(storage)

    def now(self):
        """Return the bytes that are alive."""
        storages = [reference() for reference in self.storages.values()]
        return sum(each.nbytes() for each in storages if each is not None)

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # comes back with this process's tensors
        result = operation(*args, **(kwargs or {}))
        if operation.namespace == "c10d":
            # otherwise it depends on gloo's threads when they let go of the tensors
            for each in tree_leaves(result):
                if isinstance(each, torch.ScriptObject):
                    each.wait()
            time.sleep(0.02)
        self.see(tree_leaves((args, kwargs, result)))
        self.most = max(self.most, self.now())
        return result
