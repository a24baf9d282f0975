"""Record what a rank does, one JSON object a line: run.py has it run in each.

    Recorder("0.trace", "train.py").start()

Afterwards functions of torch write a line when they are called, and do what they always
do. No random number is drawn, no collective is called, and no tensor is kept: a sample
is a hash of its numbers, and any other tensor a sketch of a few sums. compare.py reads
the lines.
"""

import functools
import json
import os
import random
import sys
import zlib
from collections import deque
from contextlib import contextmanager
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.tensor import parallel
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize
from torch.optim import optimizer as optim
from torch.utils import data
from torch.utils._pytree import tree_leaves

DETAILED = 40  # steps with a sketch of each tensor; later ones have one of all together
FORWARDS = 4  # of the first step, with the output of each module
PROJECTIONS = 3
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
MARK = "of check_yours"  # what a loader's collate_fn returns goes with the hashes
COLLECTIVES = (
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object"),
    *("reduce", "gather", "gather_object", "broadcast", "broadcast_object_list"),
    *("reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single"),
    *("send", "recv", "batch_isend_irecv"),  # P2POp takes isend and irecv as they are
)


# ---- what torch keeps to itself ------------------------------------------------------
def iterators_of_loaders():
    """Return the class of a loader's iterators, and of those with workers."""
    names = "_BaseDataLoaderIter", "_MultiProcessingDataLoaderIter"
    return [getattr(data.dataloader, name, None) for name in names]


def past_modes():
    """Return a context without run.py's float64 mode: asking it takes half the time."""
    return getattr(torch._C, "DisableTorchFunction", nullcontext)()


def in_transform():
    """Return whether torch.func is at work: its tensors have no numbers to look at."""
    peek = getattr(torch._C._functorch, "peek_interpreter_stack", lambda: None)
    return peek() is not None


# ---- hashes and sketches -------------------------------------------------------------
@functools.lru_cache(256)
def spread(length):
    """Return rows of numbers between -1 and 1, always the same, to project on."""
    generator = torch.Generator("cpu").manual_seed(length)
    options = {"generator": generator, "dtype": torch.float64, "device": "cpu"}
    return 2 * torch.rand(PROJECTIONS, length, **options) - 1


def hash_sample(sample):
    """Return a hash of all that a sample of a data set has."""
    leaves = []
    for leaf in tree_leaves(sample):
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
            leaves.append(tuple(sketch(leaf)))
        else:
            raw = leaf.tobytes() if hasattr(leaf, "tobytes") else repr(leaf).encode()
            leaves.append(zlib.crc32(raw))
    return hash(tuple(leaves)) & 0xFFFFFFFFFFFF


def tensors_in(tree, depth=2):
    """Return the tensors of nested lists and dicts, and of objects' attributes."""
    found = []
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            if leaf.layout is torch.strided and leaf.device.type != "meta":
                found.append(leaf)
        elif depth and hasattr(leaf, "__dict__") and not callable(leaf):
            found += tensors_in(vars(leaf), depth - 1)
    return found


def describe(x):
    """Return a tensor's shape, and sums over its elements.

    The sums of parts add up to the whole's. They do not depend on the order of the
    elements, nor on zeros. The last two are the sizes of what was added, to know what
    rounding is.
    """
    shape = list(x.shape)
    x = torch.view_as_real(x) if x.is_complex() else x
    x = x.detach().cpu().double().reshape(-1).nan_to_num(0.125, 0.25, 0.375)
    sums = x, x * x, x**3, torch.sin(7 * x), x.abs(), x.abs() ** 3
    return {"shape": shape, "is": torch.stack([each.sum() for each in sums]).tolist()}


def sketch(x):
    """Return [number of shards, sum of squares, projections] of a tensor or its shard.

    Projections are linear, and shards' sums add up to those of the whole tensor. So two
    runs can be compared that shard it differently, and no rank has to gather it.
    """
    x, shards = x.detach(), 1
    ramp = spread(x.numel())
    if hasattr(x, "placements"):
        ramp, mesh = ramp.reshape(-1, *x.shape), x.device_mesh
        for number, placement in enumerate(x.placements):
            if placement.is_shard():
                size, own = mesh.size(number), mesh.get_coordinate()[number]
                pieces, dim = ramp.chunk(size, placement.dim + 1), placement.dim + 1
                ramp = pieces[own] if own < len(pieces) else ramp.narrow(dim, 0, 0)
                shards *= size
        x, ramp = x.to_local(), ramp.reshape(PROJECTIONS, -1)
        x = x.wait() if hasattr(x, "wait") else x
    x = (x.to_dense() if x.is_sparse else x).cpu().double().reshape(-1)
    return [shards, x.dot(x).item(), *(ramp @ x).tolist()]


def sketch_all(pairs):
    return {name: sketch(x) for name, x in pairs}


def add_up(sketches):
    """Return one sketch of all tensors; one more of those that are sharded."""
    total = {}
    for shards, *sums in sketches.values():
        name = "all weights" if shards == 1 else f"all shards of {shards}"
        before = total.get(name, [shards, *([0.0] * len(sums))])
        added = (a + b for a, b in zip(before[1:], sums, strict=True))
        total[name] = [shards, *added]
    return total


def state_of(generator):
    """Return a hash of the state of a generator of torch, Python or NumPy."""
    if isinstance(generator, torch.Generator):
        return zlib.crc32(bytes(generator.get_state().tolist()))
    _, words, *others = (
        generator.getstate() if generator is random else (generator.get_state())
    )
    return hash((*map(int, words), *others[:1])) & 0xFFFFFFFF


class Collate:
    """Collates as a loader does, and says what each sample was before."""

    def __init__(self, collate, many):
        self.collate, self.many = collate, many

    def __call__(self, samples):
        with torch.no_grad(), past_modes():
            hashes = [hash_sample(x) for x in samples] if self.many else []
        return MARK, hashes, self.collate(samples)


def patch(owner, name, new, unless=lambda: False):
    """Have new(function, ...) called in the place of function(...), if there is one."""
    old = getattr(owner, name, None)

    @functools.wraps(old)
    def call(*args, **kwargs):
        return (old if unless() else functools.partial(new, old))(*args, **kwargs)

    if old is not None:
        setattr(owner, name, call)
    return old is not None


# ---- the recorder --------------------------------------------------------------------
class Recorder:
    """Writes the trace of a rank to a file.

    stir: draw a number from each global generator in the first forward pass. Whatever
    is another one afterwards is random.
    """

    def __init__(self, file, script, stir=False):
        self.file, self.pid = Path(file).open("w"), os.getpid()  # noqa: SIM115
        self.folder = f"{Path(script).resolve().parent}{os.sep}"
        self.ours = f"{Path(__file__).resolve().parent}{os.sep}"
        self.stir = stir
        self.loaders, self.optimizers = {}, {}  # by id; each is kept, or ids come again
        self.models, self.wrapped, self.unsynced = {}, {}, {}
        self.names, self.slots = {}, {}  # of parameters, by id; by module and attribute
        self.carriers = {}  # by name, what has buffers, or weights that nobody trains
        self.read = set()  # loaders, since the last forward pass
        self.parts = [{}]  # what each backward pass has made of gradients, by name
        self.depth = self.forwards = self.passes = self.steps = self.stepping = 0
        self.busy = self.in_backward = False
        self.detailed = True  # in the first steps
        self.inner = None  # what is noted of a forward pass, module by module

    def start(self):
        loader, workers = iterators_of_loaders()
        for owner, name, new in (
            (loader, "__init__", self.begin_pass),
            (loader, "_next_index", self.next_index),
            (loader, "__next__", self.next_batch),
            (workers, "_reset", self.begin_next_pass),
            (nn.Module, "__call__", self.call),
            (DistributedDataParallel, "__init__", self.wrap),
            (fsdp, "fully_shard", self.shard),
            (fsdp.FSDPModule, "set_requires_gradient_sync", self.set_sync),
            (parallel, "parallelize_module", self.foreign),
            (fsdp.FullyShardedDataParallel, "__init__", self.foreign),
            (torch.autograd, "backward", self.backward),
            (torch.autograd, "grad", self.grad),
            (optim.Optimizer, "zero_grad", self.zero_grad),
            (nn.utils, "clip_grad_norm_", self.clip),
            (nn.utils, "clip_grad_value_", self.clip),
            (torch, "save", self.save),
            *((dist, name, self.collective) for name in COLLECTIVES),
        ):
            if not patch(owner, name, new, unless=lambda: self.busy or in_transform()):
                self.write("unseen", what=name)
        nn.utils.clip_grad.clip_grad_norm_ = nn.utils.clip_grad_norm_
        optim.register_optimizer_step_pre_hook(self.before_step)
        optim.register_optimizer_step_post_hook(self.after_step)

    def write(self, kind, /, **fields):
        """Write a line at once, because the process can be killed."""
        if os.getpid() == self.pid:  # not in a worker of a loader
            self.file.write(json.dumps({"e": kind, **fields}, default=str) + "\n")
            self.file.flush()

    @contextmanager
    def quietly(self):
        """Compute on tensors without being watched."""
        was, self.busy = self.busy, True
        try:
            with torch.no_grad(), past_modes():
                yield
        finally:
            self.busy = was

    def is_mine(self, file):
        """Return whether a file is the script, or one beside it."""
        mine = file.startswith(self.folder) and not file.startswith(self.ours)
        return mine and "site-packages" not in file and "<" not in file

    def where(self):
        """Return the line of the script, or of a file beside it, that is executed."""
        frame = sys._getframe(1)
        while frame:
            name = resolve(frame.f_code.co_filename)
            if self.is_mine(name):
                return f"{name.removeprefix(self.folder)}:{frame.f_lineno}"
            frame = frame.f_back
        return ""

    # ---- the data --------------------------------------------------------------------
    def begin_pass(self, init, iterator, loader):
        iterator._asked, iterator._number = deque(), self.note_loader(loader)
        init(iterator, loader)
        many = getattr(iterator, "_auto_collation", True)
        iterator._collate_fn = Collate(iterator._collate_fn, many)
        self.write("pass", loader=iterator._number)

    def begin_next_pass(self, reset, iterator, loader, first_iter=False):
        if not first_iter:  # if the workers are persistent
            iterator._asked.clear()
            self.write("pass", loader=iterator._number)
        reset(iterator, loader, first_iter)

    def next_index(self, next_index, iterator):
        index = next_index(iterator)  # with workers, long before the batch comes
        iterator._asked.append(index)
        return index

    def next_batch(self, next_batch, iterator):
        batch, hashes = next_batch(iterator), []
        first = batch[0] if isinstance(batch, (tuple, list)) and batch else None
        if isinstance(first, str) and first == MARK:
            _, hashes, batch = batch
        index = iterator._asked.popleft() if iterator._asked else None
        index = index if isinstance(index, (list, tuple)) else [index]
        index = index_below_subsets(iterator._dataset, index)
        self.write("batch", loader=iterator._number, index=index, hashes=hashes)
        self.read.add(iterator._number)
        return batch

    def note_loader(self, loader):
        if id(loader) not in self.loaders:
            self.loaders[id(loader)] = len(self.loaders), loader
            batches, dataset = loader.batch_sampler, loader.dataset
            sampler = getattr(batches, "sampler", loader.sampler)
            plain = type(batches) in (data.BatchSampler, type(None))
            subset = None
            if isinstance(dataset, data.Subset):
                subset = hash(tuple(sorted(int(i) for i in dataset.indices)))
            shuffles = hasattr(sampler, "set_epoch") and getattr(sampler, "shuffle", 0)
            self.write(
                "loader",
                id=len(self.loaders) - 1,
                at=self.where(),
                size=len(dataset) if hasattr(dataset, "__len__") else None,
                subset=subset,
                sampler=type(sampler if plain else batches).__name__,
                replicas=getattr(sampler, "num_replicas", None),
                shuffles=bool(shuffles),
                pads=getattr(sampler, "drop_last", None) is False,
            )
        return self.loaders[id(loader)][0]

    def random_states(self):
        """Return a hash for each global generator."""
        states = {
            "torch": state_of(torch.default_generator),
            "random": state_of(random),
        }
        if numpy := sys.modules.get("numpy"):
            states["NumPy"] = state_of(numpy.random)
        return states

    # ---- the models ------------------------------------------------------------------
    def call(self, call, module, *args, **kwargs):
        if not self.depth:
            if isinstance(module, parametrize.ParametrizationList):
                return call(module, *args, **kwargs)  # a weight, as of spectral_norm
            if next(module.parameters(), None) is None:  # a loss, or an activation
                if next(module.buffers(), None) is not None:
                    with self.quietly():
                        self.note_carrier(module)
                return call(module, *args, **kwargs)
            self.before_outermost(module, args, kwargs)
        self.depth += 1
        try:
            output = call(module, *args, **kwargs)
        finally:
            self.depth -= 1
        if self.inner is not None:
            self.note_output(module, output)
        return output

    def wrap(self, init, wrapper, module, *args, **kwargs):
        init(wrapper, module, *args, **kwargs)
        covered = {id(p) for p in module.parameters() if p.requires_grad}
        self.wrapped[id(wrapper)] = "DistributedDataParallel", wrapper, covered
        self.write("wrap", how="DDP", at=self.where())

    def shard(self, shard, module, *args, **kwargs):
        done = shard(module, *args, **kwargs)
        for each in module if isinstance(module, (list, tuple)) else [module]:
            self.wrapped[id(each)] = "fully_shard", each, None
            self.write("wrap", how="fully_shard", at=self.where())
            each.register_forward_pre_hook(self.hook_gathered)
        return done

    def set_sync(self, set_sync, module, wanted, *args, **kwargs):
        self.unsynced |= {id(each): not wanted for each in module.modules()}
        return set_sync(module, wanted, *args, **kwargs)

    def foreign(self, function, *args, **kwargs):
        name = function.__qualname__.removesuffix(".__init__")
        self.write("foreign", how=name, at=self.where())
        return function(*args, **kwargs)

    def wrappers(self):
        """Return what is wrapped, the outermost first."""
        return [module for _, module, _ in reversed(self.wrapped.values())]

    def learn_names(self, module):
        """Give each parameter the name that it has in the model without the wrapper."""
        inner = without_wrapper(module)
        new = [(n, p) for n, p in inner.named_parameters() if id(p) not in self.names]
        if id(inner) in self.models and not new:
            return
        number, _ = self.models.setdefault(id(inner), (len(self.models) + 1, inner))
        taken = set(self.names.values())
        for name, p in new:
            if name in taken:  # of another network
                name = f"{type(inner).__name__} {number}: {name}"
            self.names[id(p)] = name
            if p.requires_grad and not hasattr(p, "placements"):
                self.hook(p, name, p)
        for each in inner.modules():
            for slot, p in each.named_parameters(recurse=False):
                self.slots[id(each), slot] = self.names.get(id(p))

    def hook(self, p, name, leaf=None):
        """Have the gradients that the rank computes for a parameter added up.

        leaf: what has the gradient; what fully_shard has gathered has none of its own.
        """

        def add(gradient):
            if self.in_backward and self.detailed and not self.busy:
                with self.quietly():
                    if leaf is not None and leaf.grad is None:
                        self.forget([name])
                    own, before = sketch(gradient)[2:], self.parts[-1].get(name)
                    if before:
                        own = [a + b for a, b in zip(own, before, strict=True)]
                    self.parts[-1][name] = own

        p.register_hook(add)

    def hook_gathered(self, module, _):
        """Do so for what fully_shard has gathered for a forward pass."""
        if self.busy or not torch.is_grad_enabled() or not self.detailed:
            return
        for each in module.modules():
            for slot, p in each.named_parameters(recurse=False):
                name = self.slots.get((id(each), slot))
                whole = not hasattr(p, "placements") and p.requires_grad
                if name and whole and id(p) not in self.names:
                    self.names[id(p)] = name
                    self.hook(p, name)

    def forget(self, names):
        for part in self.parts:
            for name in names:
                part.pop(name, None)

    def before_outermost(self, module, args, kwargs):
        inner = without_wrapper(module)
        trains = any(p.requires_grad for p in inner.parameters())
        trains = trains and module.training and torch.is_grad_enabled()
        with self.quietly():
            self.note_carrier(inner)
            if not trains:
                self.write("evaluate")
                self.read.clear()
                return
            while self.read:
                self.write("trains", loader=self.read.pop())
            how, inside, around = self.how_called(module)
            for each in (around, module, *self.wrappers()):
                self.learn_names(each)
            event = {}
            if self.detailed:
                given = [x for x in tensors_in((args, kwargs)) if x.dim()]
                event["arguments"] = [describe(x) for x in given]
                event["carried"] = self.sketch_carried()
                event["weights"] = add_up(sketch_all(inner.named_parameters()))
                event["states"] = self.random_states()
                layers = inner.named_modules() if self.forwards < FORWARDS else ()
                self.inner = {id(m): n for n, m in layers}, [], module
            norms = {
                type(m).__name__ for m in inner.modules() if hasattr(m, "running_mean")
            }
            self.write(
                "forward",
                how=how,
                inside=inside,
                model=type(inner).__name__,
                sync=self.synchronizes(module),
                at=self.where(),
                norms=[*norms],
                drops=any(isinstance(m, DROPOUTS) and m.p for m in inner.modules()),
                **event,
            )
            self.forwards, self.passes = self.forwards + 1, self.passes + 1
        if self.stir and self.forwards == 1:
            torch.rand(1), random.random()
            if "numpy" in sys.modules:
                sys.modules["numpy"].random.random()

    def how_called(self, module):
        """Return the wrapper or "bare", that around a bare one, and its model."""
        if id(module) in self.wrapped:
            return self.wrapped[id(module)][0], "", module
        for how, other, _ in reversed(self.wrapped.values()):
            if any(m is module for m in other.modules()):
                return "bare", how, other
        return "bare", "", module

    def synchronizes(self, module):
        """Return whether a wrapper will average the gradients of this forward pass."""
        if isinstance(module, DistributedDataParallel):
            return bool(getattr(module, "require_backward_grad_sync", True))
        return not self.unsynced.get(id(module), False)

    def note_carrier(self, module):
        """Remember a module that is called: what it carries is noted in each step."""
        if not any(module is each for each in self.carriers.values()):
            name = type(module).__name__
            same = sum(each.startswith(name) for each in self.carriers)
            name = f"{name} {same + 1}" if same else name
            self.carriers[name] = module
            if self.detailed:
                self.write("carries", carried=self.sketch_carried({name: module}))

    def sketch_carried(self, carriers=None):
        """Return sketches of the buffers of what is called, and of the weights that no
        optimizer has, as of a teacher.
        """
        groups = [g for _, o in self.optimizers.values() for g in o.param_groups]
        owned = {id(p) for group in groups for p in group["params"]}
        found = {}
        for owner, module in (carriers or self.carriers).items():
            pairs = list(module.named_buffers())
            for name, p in module.named_parameters():
                if not p.requires_grad or self.optimizers and id(p) not in owned:
                    pairs.append((name, p))
            for name, x in pairs:
                name = name if id(module) in self.models else f"{name} of {owner}"
                if x.device.type != "meta" and "num_batches" not in name:
                    found[name] = sketch(x)
        return found

    def note_output(self, module, output):
        """Note what a module returns, and write it once the outermost one has."""
        names, outputs, outermost = self.inner
        name = "" if module is outermost else names.get(id(module))
        with self.quietly():
            if name or module is outermost:
                each = [describe(x) for x in tensors_in(output) if x.dim()]
                outputs.append([name, type(module).__name__, each])
            if not self.depth:
                self.write("outputs", outputs=outputs)
                self.inner = None

    # ---- the loop --------------------------------------------------------------------
    def backward(self, backward, tensors, *args, **kwargs):
        loss = tensors if isinstance(tensors, torch.Tensor) else [*tensors, None][0]
        known = isinstance(loss, torch.Tensor) and loss.numel() == 1
        known = known and not hasattr(loss, "placements")
        value = loss.detach().double().item() if known else None
        self.depth += 1  # activation checkpointing calls modules again in there
        was, self.in_backward = self.in_backward, True
        try:
            return backward(tensors, *args, **kwargs)
        finally:
            self.depth, self.in_backward = self.depth - 1, was
            self.write("backward", loss=value, at=self.where())
            self.parts.append({})

    def grad(self, grad, outputs, inputs, *args, **kwargs):
        if {id(x) for x in tensors_in([inputs])} & self.names.keys():
            self.write("grad", at=self.where())
        return grad(outputs, inputs, *args, **kwargs)

    def zero_grad(self, zero_grad, optimizer, *args, **kwargs):
        self.forget([name for name, _ in self.named(optimizer)])
        return zero_grad(optimizer, *args, **kwargs)

    def clip(self, clip, *args, **kwargs):
        at, result = self.where(), clip(*args, **kwargs)
        self.write("clip", at=at, norm=None if result is None else float(result))
        return result

    def named(self, optimizer):
        for number, group in enumerate(optimizer.param_groups):
            for i, p in enumerate(group["params"]):
                yield self.names.get(id(p), f"parameter {i} of group {number}"), p

    def before_step(self, optimizer, args, kwargs):
        self.stepping += 1
        if self.stepping > 1:  # an optimizer inside of another
            return None
        with self.quietly():
            for module in self.wrappers():  # called in a closure only
                self.learn_names(module)
            if id(optimizer) not in self.optimizers:
                self.note_optimizer(optimizer)
            pairs = list(self.named(optimizer))
            late, outside = self.find_uncovered(pairs)
            before = sketch_all(pairs) if self.detailed else {}
            args, kwargs, closure = self.watch_closure(optimizer, args, kwargs, before)
            self.write(
                "step",
                optimizer=self.optimizers[id(optimizer)][0],
                kind=type(optimizer).__name__,
                at=self.where(),
                closure=closure,
                options=[simple_options(each) for each in optimizer.param_groups],
                late=late,
                outside=outside,
                **self.gradients(pairs),
            )
        return args, kwargs

    def gradients(self, pairs):
        """Return what the optimizer gets, and what the rank has made itself."""
        got = sketch_all((n, p.grad) for n, p in pairs if p.grad is not None)
        names = [name for name, _ in pairs] if self.detailed else []
        parts = [{n: part[n] for n in names if n in part} for part in self.parts]
        local = [part for part in parts if part]
        return {"gradients": got if self.detailed else add_up(got), "local": local}

    def watch_closure(self, optimizer, args, kwargs, before):
        """Have the first call of a closure noted, before any weight has changed."""
        closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
        if not callable(closure):
            return args, kwargs, False
        calls = []

        def new_closure(*given):
            result = closure(*given)
            calls.append(1)
            with self.quietly():
                pairs = list(self.named(optimizer))
                now = sketch_all(pairs)  # by names that are known since the first pass
                if len(calls) == 1 and [*before.values()] == [*now.values()]:
                    self.write("closure", **self.gradients(pairs))
            return result

        if "closure" in kwargs:
            return args, {**kwargs, "closure": new_closure}, True
        return (args[0], new_closure, *args[2:]), kwargs, True

    def note_optimizer(self, optimizer):
        number = len(self.optimizers)
        self.optimizers[id(optimizer)] = number, optimizer
        pairs = list(self.named(optimizer))
        known = {id(p) for _, model in self.models.values() for p in model.parameters()}
        self.write(
            "start",
            optimizer=number,
            weights=sketch_all(pairs),
            lost=[name for name, p in pairs if known and id(p) not in known],
            size=sum(p.numel() for _, p in pairs),
            dtypes=sorted({str(p.dtype).removeprefix("torch.") for _, p in pairs}),
        )

    def find_uncovered(self, pairs):
        """Return the names of gradients that no wrapper averages, and of late ones.

        Late is what DDP did not see, because it was frozen or not there yet.
        """
        inside = {id(p) for _, m, _ in self.wrapped.values() for p in m.parameters()}
        covered = [ids for _, _, ids in self.wrapped.values() if ids is not None]
        pairs = [(n, p) for n, p in pairs if p.requires_grad and self.wrapped]
        outside = [name for name, p in pairs if id(p) not in inside]
        pairs = [(n, p) for n, p in pairs if covered and not hasattr(p, "placements")]
        seen = set().union(*covered)
        return [n for n, p in pairs if id(p) in inside - seen], outside

    def after_step(self, optimizer, args, kwargs):  # noqa: ARG002
        self.stepping -= 1
        if self.stepping:
            return
        with self.quietly():
            self.forget([name for name, _ in self.named(optimizer)])
            self.parts = [part for part in self.parts if part] + [{}]
            each = sketch_all(self.named(optimizer))
            self.write(
                "stepped",
                optimizer=self.optimizers[id(optimizer)][0],
                weights=each if self.detailed else add_up(each),
            )
        self.steps, self.passes = self.steps + 1, 0
        self.detailed = self.steps < DETAILED

    # ---- the rest --------------------------------------------------------------------
    def collective(self, function, *args, **kwargs):
        # Of what is done in torch.distributed.nn, or in a Function of the script's own,
        # the gradient is not lost.
        name, tensors = function.__name__, tensors_in((args, kwargs))
        tensors = [x for x in tensors if x.is_floating_point() and x.numel() > 1]
        lost = any(x.requires_grad or x.dim() > 1 and "gather" in name for x in tensors)
        # nor of what is given to no model before, as a metric of the step before
        lost = lost and self.passes and "ctx" not in sys._getframe(2).f_locals
        self.write("collective", name=name, at=self.where(), lost=lost)
        return function(*args, **kwargs)

    def save(self, save, what, f, *args, **kwargs):
        if isinstance(f, (str, os.PathLike)):
            self.write("write", file=resolve(f), at=self.where())
        return save(what, f, *args, **kwargs)

    def end(self):
        """Write the weights at the end of the training, and the script's files."""
        with self.quietly():
            for number, optimizer in self.optimizers.values():
                weights = sketch_all(self.named(optimizer))
                self.write("last", optimizer=number, weights=weights)
            files = [getattr(m, "__file__", None) for m in [*sys.modules.values()]]
            self.write("end", files=[f for f in files if f and self.is_mine(f)])
        self.busy = True


# ---- small questions -----------------------------------------------------------------
@functools.cache
def resolve(file):
    return str(Path(file).resolve())


def index_below_subsets(dataset, index):
    """Return the samples' numbers in the data set that the subsets were taken from."""
    if isinstance(dataset, data.IterableDataset):
        return None
    try:
        index = [int(i) for i in index]
        while isinstance(dataset, data.Subset):
            index = [int(dataset.indices[i]) for i in index]
            dataset = dataset.dataset
        return index
    except (TypeError, ValueError, IndexError):
        return None


def without_wrapper(module):
    return module.module if isinstance(module, DistributedDataParallel) else module


def simple_options(group):
    """Return the numbers of a parameter group, such as its learning rate."""
    options = {"parameters": len(group["params"])}
    for name, value in group.items():
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if isinstance(value, (int, float)):
            options[name] = value
    return options
