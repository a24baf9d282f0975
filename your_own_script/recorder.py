"""Record what a rank does, one JSON object a line: check_yours.py has it run in each.

    Recorder("0.trace", "train.py").start()

Afterwards functions of torch write a line when they are called, and do what they always
do. No random number is drawn, no collective is called, and no tensor is kept: a sample
is a hash of its numbers, and a weight or a gradient is a sketch of two numbers.
differences.py reads the lines. In the order of this file they are about

    the data        loader, pass, batch
    the models      wrap, forward, outputs, operation, evaluate
    the loop        backward, clip, start, step, stepped, last
    the rest        collective, done, write, end
"""

import functools
import json
import os
import random
import sys
import zlib
from collections import Counter
from collections import deque
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.tensor import parallel
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as optim
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.data import Subset
from torch.utils.data import dataloader

DETAILED = 20  # steps with a sketch of each tensor; later ones have one of all together
FORWARDS = 4  # of the first step, with the output of each module
ROWS = 32  # more samples than that are thinned out, by their hashes, in such outputs
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
COLLECTIVES = (
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object"),
    *("all_to_all", "barrier", "broadcast", "broadcast_object_list", "gather"),
    *("gather_object", "monitored_barrier", "reduce", "reduce_scatter", "scatter"),
    *("reduce_scatter_tensor", "scatter_object_list", "send", "recv"),
)


# ---- hashes and sketches -------------------------------------------------------------
@functools.cache
def odd(length):
    """Return odd numbers, always the same: a row's hash is its values times these."""
    x = torch.arange(1, length + 1) * 0x5851F42D4C957F2D + 0x14057B7EF767814F
    return (x ^ (x >> 29)) * 0x2545F4914F6CDD1D | 1


@functools.cache
def spread(length):
    """Return numbers between -1 and 1, always the same, to project a tensor on."""
    return (odd(length) >> 12).double() / 2**51


def hash_rows(x, rows):
    """Return a hash of each of the rows of a tensor, in int64.

    A floating-point number counts with 16 bits: what another network has computed, such
    as a generator's picture, is rounded differently on two processes.
    """
    x = x.detach().cpu().contiguous()
    if not x.numel():
        return torch.zeros(rows, dtype=torch.int64)
    if x.is_complex():
        x = torch.view_as_real(x)
    if x.is_floating_point():
        mantissa, exponent = x.double().frexp()
        x = (mantissa * 2**16).round().long() * 4096 + exponent
    x = x.reshape(rows, -1).contiguous()
    x = x.view(BITS[x.element_size()]).long()
    return (x * odd(x.shape[1])).sum(1)


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


def samples_of(tree, count=None, dim=0):
    """Return a hash for each sample of a batch, of all its tensors together.

    count: how many samples there are, if that is known; otherwise the size of the first
    tensor. Without tensors, or if their sizes do not fit, there are none.
    """
    tensors = [x for x in tensors_in(tree) if x.dim() > dim]
    if tensors and count is None:
        count = tensors[0].shape[dim]
    total = None
    for x in tensors:
        if x.shape[dim] == count:
            hashed = hash_rows(x.movedim(dim, 0), count)
            total = hashed if total is None else total * 0x2545F491 + hashed
    return shorten(total)


def shorten(hashes):
    return [] if hashes is None else (hashes & 0xFFFFFFFFFFFF).tolist()


def sketch(x):
    """Return [sum of squares, projection, number of shards] of a tensor or its shard.

    Shards' sums add up to those of the whole tensor. So two runs can be compared that
    shard it differently, and no rank has to gather it.
    """
    x, shards = x.detach(), 1
    ramp = spread(x.numel())
    if hasattr(x, "placements"):
        ramp, mesh = ramp.reshape(x.shape), x.device_mesh
        for number, placement in enumerate(x.placements):
            if placement.is_shard():
                size, own = mesh.size(number), mesh.get_coordinate()[number]
                pieces, dim = ramp.chunk(size, placement.dim), placement.dim
                ramp = pieces[own] if own < len(pieces) else ramp.narrow(dim, 0, 0)
                shards *= size
        x, ramp = x.to_local(), ramp.reshape(-1)
        x = x.wait() if hasattr(x, "wait") else x
    x = (x.to_dense() if x.is_sparse else x).cpu().double().reshape(-1)
    return [x.dot(x).item(), x.dot(ramp).item(), shards]


def add_up(sketches):
    """Return one sketch of all tensors; one more of those that are sharded."""
    total = {}
    for squares, projection, shards in sketches.values():
        name = "all weights" if shards == 1 else f"all shards of {shards}"
        one = total.setdefault(name, [0.0, 0.0, shards])
        one[0], one[1] = one[0] + squares, one[1] + projection
    return total


def random_states():
    """Return a hash for each global generator: torch's, Python's and NumPy's."""
    states = [hash_rows(torch.get_rng_state(), 1).item(), hash(random.getstate()[1])]
    numpy = sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy, "random"):
        _, words, position, *_ = numpy.random.get_state()
        states.append(zlib.crc32(words.tobytes()) + position)
    return [each & 0xFFFFFFFF for each in states]


def moments(tree):
    """Return how far the columns' means are from 0, and their deviations from 1."""
    for x in tensors_in(tree):
        if x.is_floating_point() and x.dim() > 1 and len(x) > 1:
            x = x.detach().double().reshape(len(x), -1)
            return [x.mean(0).abs().max().item(), (x.std(0) - 1).abs().max().item()]
    return None


# ---- the recorder --------------------------------------------------------------------
class Recorder:
    """Writes the trace of a rank to a file.

    stir: draw a number from each global generator in the first forward pass. Whatever
    is another one afterwards is random. operations: note the output of each operation
    between that pass and the first backward pass, for each sample.
    """

    def __init__(self, file, script, stir=False, operations=False):
        self.file, self.pid = Path(file).open("w"), os.getpid()  # noqa: SIM115
        self.folder = f"{Path(script).resolve().parent}{os.sep}"
        here = Path(__file__).resolve()
        self.ours = {str(here), str(here.with_name("check_yours.py"))}
        self.stir = stir
        self.loaders, self.optimizers = {}, {}  # by id; each is kept, or ids come again
        self.models, self.wrapped, self.names, self.tied = {}, {}, {}, []
        self.generators = {}  # of the script's own, by id
        self.depth = self.forwards = self.steps = self.stepping = 0
        self.busy = False  # recording, or in what is not to be recorded
        self.inner = None  # what is noted of a forward pass, module by module
        self.mode = Operations(self) if operations else None
        self.evaluated = None  # the model and the step whose weights are noted

    def start(self):
        self.patch_data()
        self.patch_models()
        self.patch_loop()
        self.patch_collectives()
        self.patch_files()

    def write(self, kind, /, **fields):
        """Write a line at once, because the process can be killed."""
        if os.getpid() == self.pid:  # not in a worker of a loader
            self.file.write(json.dumps({"e": kind, **fields}, default=str) + "\n")
            self.file.flush()

    @contextmanager
    def quietly(self):
        """Compute on tensors as if nobody watched, whatever mode the script is in."""
        was, self.busy = self.busy, True
        try:
            modes = torch._C.DisableTorchFunction(), _disable_current_modes()
            with torch.no_grad(), modes[0], modes[1]:
                yield
        finally:
            self.busy = was

    def where(self):
        """Return the line of the script, or of a file beside it, that is executed."""
        frame = sys._getframe(1)
        while frame:
            name = resolve(frame.f_code.co_filename)
            mine = name.startswith(self.folder) and name not in self.ours
            if mine and "site-packages" not in name and "<" not in name:
                return f"{name.removeprefix(self.folder)}:{frame.f_lineno}"
            frame = frame.f_back
        return ""

    # ---- the data --------------------------------------------------------------------
    def patch_data(self):
        """loader, pass, batch: the samples that a loader returns, by index and hash."""
        record, base = self, dataloader._BaseDataLoaderIter
        init, next_index, next_batch = base.__init__, base._next_index, base.__next__

        def new_init(self, loader):
            self._asked, self._loader_number = deque(), record.note_loader(loader)
            init(self, loader)
            record.write("pass", loader=self._loader_number)

        def new_next_index(self):  # with workers, this is long before the batch comes
            index = next_index(self)
            self._asked.append(index)
            return index

        def new_next_batch(self):
            batch = next_batch(self)
            with record.quietly():
                index = self._asked.popleft() if self._asked else None
                index = index if isinstance(index, (list, tuple)) else [index]
                rows = samples_of(batch, len(index)) or samples_of(batch)
                index = index_below_subsets(self._dataset, index)
                record.write(
                    "batch", loader=self._loader_number, index=index, rows=rows
                )
            return batch

        base.__init__, base._next_index = new_init, new_next_index
        base.__next__ = new_next_batch
        workers = dataloader._MultiProcessingDataLoaderIter
        reset = workers._reset

        def new_reset(self, loader, first_iter=False):  # if the workers are persistent
            if not first_iter:
                self._asked.clear()
                record.write("pass", loader=self._loader_number)
            reset(self, loader, first_iter)

        workers._reset = new_reset

    def note_loader(self, loader):
        if id(loader) not in self.loaders:
            self.loaders[id(loader)] = len(self.loaders), loader
            sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
            subset = None
            if isinstance(loader.dataset, Subset):
                subset = hash(tuple(sorted(int(i) for i in loader.dataset.indices)))
            try:
                size = len(loader.dataset)
            except TypeError:
                size = None
            self.write(
                "loader",
                id=len(self.loaders) - 1,
                at=self.where(),
                size=size,
                subset=subset,
                sampler=type(sampler).__name__,
                seed=getattr(sampler, "seed", None),
                rank=getattr(sampler, "rank", None),
                replicas=getattr(sampler, "num_replicas", None),
                epochs=hasattr(sampler, "set_epoch")
                or hasattr(loader.batch_sampler, "set_epoch"),
                pads=getattr(sampler, "drop_last", None) is False,
                drop_last=loader.drop_last,
            )
        return self.loaders[id(loader)][0]

    # ---- the models ------------------------------------------------------------------
    def patch_models(self):
        """wrap to evaluate: what is called, and on which samples."""
        record, call = self, nn.Module.__call__

        def new_call(self, *args, **kwargs):
            if record.busy:
                return call(self, *args, **kwargs)
            if not record.depth:
                if next(self.parameters(), None) is None:  # a loss, or an activation
                    return call(self, *args, **kwargs)
                record.before_outermost(self, args, kwargs)
            record.depth += 1
            try:
                output = call(self, *args, **kwargs)
            finally:
                record.depth -= 1
            if record.inner is not None:
                record.note_output(self, output)
            return output

        nn.Module.__call__ = new_call
        wrap, shard, empty = (
            DistributedDataParallel.__init__,
            fsdp.fully_shard,
            nn.Module.to_empty,
        )

        def new_wrap(self, module, *args, **kwargs):
            wrap(self, module, *args, **kwargs)
            covered = {id(p) for p in module.parameters() if p.requires_grad}
            record.wrapped[id(self)] = "DistributedDataParallel", self, covered
            ranks = dist.get_world_size(self.process_group)
            record.write("wrap", how="DDP", at=record.where(), ranks=ranks)

        @functools.wraps(shard)
        def new_shard(module, *args, **kwargs):
            modules = module if isinstance(module, (list, tuple)) else [module]
            tied = [find_tied(each) for each in modules]
            done = shard(module, *args, **kwargs)
            for each, names in zip(modules, tied, strict=True):
                record.wrapped[id(each)] = "fully_shard", each, None
                record.tied += [(each, names, "fully_shard", record.where())]
                meshes = [getattr(p, "device_mesh", None) for p in each.parameters()]
                ranks = max((mesh.size() for mesh in meshes if mesh), default=0)
                record.write("wrap", how="fully_shard", at=record.where(), ranks=ranks)
            return done

        def new_empty(self, *args, **kwargs):
            names = find_tied(self)
            done = empty(self, *args, **kwargs)
            record.tied += [(self, names, "to_empty", record.where())]
            return done

        DistributedDataParallel.__init__ = new_wrap
        fsdp.fully_shard = new_shard
        nn.Module.to_empty = new_empty

        def foreign(name, function):
            @functools.wraps(function)
            def new_function(*args, **kwargs):
                record.write("foreign", how=name, at=record.where())
                return function(*args, **kwargs)

            return new_function

        parallel.parallelize_module = foreign(
            "tensor parallelism", parallel.parallelize_module
        )
        nn.DataParallel.__init__ = foreign("nn.DataParallel", nn.DataParallel.__init__)

    def note_untied(self):
        """Write which weights were one tensor, and are several when training begins."""
        for module, names, by, at in self.tied:
            now = dict(module.named_parameters(remove_duplicate=False))
            for tied in names:
                if len({id(now[name]) for name in tied if name in now}) > 1:
                    self.write("untied", names=tied, by=by, at=at)
        self.tied = []

    def learn_names(self, module):
        """Give each parameter the name that it has in the model without the wrapper."""
        inner = without_wrapper(module)
        if id(inner) in self.models:
            return
        self.models[id(inner)] = inner
        taken = set(self.names.values())
        for name, p in inner.named_parameters():
            if name in taken:  # of another network
                name = f"{type(inner).__name__} {len(self.models)}: {name}"
            self.names.setdefault(id(p), name)

    def before_outermost(self, module, args, kwargs):
        with self.quietly():
            samples = samples_of((args, kwargs))
        trainable = any(p.requires_grad for p in module.parameters())
        if not (torch.is_grad_enabled() and module.training and trainable):
            self.note_evaluation(module, samples)
            return
        with self.quietly():
            self.learn_names(module)
            how, inside = self.how_called(module)
            first = {}
            if not self.steps:
                given = [x for x in tensors_in((args, kwargs)) if x.dim()]
                first["arguments"] = [shorten(hash_rows(x, len(x))) for x in given]
                first["shapes"] = [list(x.shape) for x in given]
                first["moments"] = moments(given)
            if self.steps < DETAILED:
                first["columns"] = samples_of((args, kwargs), dim=1)
            if not self.steps and self.forwards < FORWARDS:
                names = {id(m): n for n, m in without_wrapper(module).named_modules()}
                self.inner = names, samples, []
            norms = {type(m).__name__ for m in module.modules() if is_norm(m)}
            drops = (nn.modules.dropout._DropoutNd,)
            self.write(
                "forward",
                how=how,
                inside=inside,
                model=type(without_wrapper(module)).__name__,
                rows=samples,
                states=random_states(),
                sync=synchronizes(module),
                at=self.where(),
                norms=sorted(norms),
                drops=any(isinstance(m, drops) and m.p for m in module.modules()),
                **first,
            )
            self.forwards += 1
        if self.stir and self.forwards == 1:
            self.draw_from_all()
        if self.mode and not self.steps:
            self.mode.watch(samples)

    def draw_from_all(self):
        torch.rand(1)
        random.random()
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.random()
        for generator in self.generators.values():
            torch.rand(1, generator=generator)

    def how_called(self, module):
        """Return "bare" or the wrapper, and the wrapper around a bare one."""
        if id(module) in self.wrapped:
            return self.wrapped[id(module)][0], ""
        for how, other, _ in self.wrapped.values():
            if other is not module and any(m is module for m in other.modules()):
                return "bare", how
        return "bare", ""

    def note_evaluation(self, module, samples):
        inner = without_wrapper(module)
        weights = {}
        if self.evaluated != (id(inner), self.steps):
            self.evaluated = id(inner), self.steps
            with self.quietly():
                tensors = dict(inner.named_parameters())
                weights["weights"] = add_up({n: sketch(p) for n, p in tensors.items()})
                weights["buffers"] = self.sketch_buffers([inner])
        model = type(inner).__name__
        self.write("evaluate", model=model, rows=samples, at=self.where(), **weights)

    def note_output(self, module, output):
        """Note a module's output for each sample, in two numbers."""
        names, samples, outputs = self.inner
        with self.quietly():
            for x in tensors_in(output)[:1]:
                name = names.get(id(module), None if self.depth else "")
                kept, x = rows_of(x, samples)
                if name is not None and kept:
                    numbers = (x @ spread(x.shape[1])).tolist(), x.norm(dim=1).tolist()
                    each = [list(row) for row in zip(kept, *numbers, strict=True)]
                    outputs.append([name, type(module).__name__, each])
            if not self.depth:
                self.write("outputs", outputs=outputs)
                self.inner = None

    def sketch_buffers(self, models):
        buffers = {}
        for model in models:
            for name, each in model.named_buffers():
                if not hasattr(each, "placements") and each.device.type != "meta":
                    buffers[name] = sketch(each)
        return buffers

    # ---- the loop --------------------------------------------------------------------
    def patch_loop(self):
        """backward, clip, start, step, stepped: losses, gradients and weights."""
        record, backward = self, torch.autograd.backward

        def new_backward(tensors, *args, **kwargs):
            if record.mode:
                record.mode.stop()
            loss = tensors if isinstance(tensors, torch.Tensor) else [*tensors, None][0]
            known = isinstance(loss, torch.Tensor) and loss.numel() == 1
            known = known and not hasattr(loss, "placements")
            value = loss.detach().double().item() if known else None
            record.write("backward", loss=value, at=record.where())
            record.depth += 1  # activation checkpointing calls modules again in there
            try:
                return backward(tensors, *args, **kwargs)
            finally:
                record.depth -= 1

        torch.autograd.backward = new_backward
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            self.patch_clip(name)
        optim.register_optimizer_step_pre_hook(self.before_step)
        optim.register_optimizer_step_post_hook(self.after_step)

    def patch_clip(self, name):
        clip = getattr(nn.utils, name)

        @functools.wraps(clip)
        def new_clip(parameters, *args, **kwargs):
            if not isinstance(parameters, torch.Tensor):
                parameters = list(parameters)
            with self.quietly():
                gradients = {}
                if self.steps < DETAILED:
                    each = enumerate(tensors_in(parameters))
                    each = [(self.names.get(id(p), f"number {n}"), p) for n, p in each]
                    gradients = {n: sketch(p.grad) for n, p in each if has_gradient(p)}
                self.write("clip", at=self.where(), gradients=gradients)
            return clip(parameters, *args, **kwargs)

        setattr(nn.utils, name, new_clip)
        setattr(nn.utils.clip_grad, name, new_clip)

    def parameters(self, optimizer):
        for number, group in enumerate(optimizer.param_groups):
            for i, p in enumerate(group["params"]):
                yield self.names.get(id(p), f"number {i} of group {number}"), p

    def before_step(self, optimizer, args, kwargs):
        self.stepping += 1
        if self.stepping > 1:  # an optimizer inside of another
            return
        with self.quietly():
            for _, module, _ in self.wrapped.values():  # called in a closure only
                self.learn_names(module)
            if id(optimizer) not in self.optimizers:
                self.note_optimizer(optimizer)
            pairs, detailed = list(self.parameters(optimizer)), self.steps < DETAILED
            late, outside = self.find_uncovered(pairs)
            gradients = {name: sketch(p.grad) for name, p in pairs if has_gradient(p)}
            state = [
                value
                for _, p in pairs
                for value in optimizer.state.get(p, {}).values()
                if isinstance(value, torch.Tensor) and value.numel() > 1
            ]
            self.write(
                "step",
                optimizer=self.optimizers[id(optimizer)][0],
                kind=type(optimizer).__name__,
                at=self.where(),
                closure=len(args) > 1 or kwargs.get("closure") is not None,
                options=[simple_options(each) for each in optimizer.param_groups],
                gradients=gradients if detailed else add_up(gradients),
                before=add_up({n: sketch(p) for n, p in pairs}) if detailed else {},
                entries=len(state),
                state=add_up(dict(enumerate(map(sketch, state)))),
                late=late,
                outside=outside,
                states=random_states(),
            )

    def note_optimizer(self, optimizer):
        self.note_untied()
        number = len(self.optimizers)
        self.optimizers[id(optimizer)] = number, optimizer
        pairs = list(self.parameters(optimizer))
        known = {id(p) for model in self.models.values() for p in model.parameters()}
        lost = [name for name, p in pairs if known and id(p) not in known]
        weights = {name: sketch(p) for name, p in pairs}
        self.write("start", optimizer=number, weights=weights, lost=lost)

    def find_uncovered(self, pairs):
        """Return the names of gradients that no wrapper averages, and of late ones.

        Late is what DDP did not see, because it was frozen or not there yet.
        """
        inside = {id(p) for _, m, _ in self.wrapped.values() for p in m.parameters()}
        covered = [ids for _, _, ids in self.wrapped.values() if ids is not None]
        late, outside = [], []
        for name, p in pairs:
            if has_gradient(p) and self.wrapped:
                if id(p) not in inside:
                    outside.append(name)
                elif covered and not any(id(p) in ids for ids in covered):
                    late += [] if hasattr(p, "placements") else [name]
        return late, outside

    def after_step(self, optimizer, args, kwargs):  # noqa: ARG002
        self.stepping -= 1
        if self.stepping:
            return
        with self.quietly():
            each = {name: sketch(p) for name, p in self.parameters(optimizer)}
            self.write(
                "stepped",
                optimizer=self.optimizers[id(optimizer)][0],
                weights=each if self.steps < DETAILED else add_up(each),
                total=add_up(each),
                buffers=self.sketch_buffers(self.models.values()),
            )
        self.steps += 1

    # ---- the rest --------------------------------------------------------------------
    def patch_collectives(self):
        """collective, done: where a rank waits if the run hangs."""
        for name in COLLECTIVES:
            self.patch_collective(name, getattr(dist, name))

    def patch_collective(self, name, function):
        @functools.wraps(function)
        def new_function(*args, **kwargs):
            if self.busy:
                return function(*args, **kwargs)
            self.write("collective", name=name, at=self.where())
            result = function(*args, **kwargs)
            self.write("done")
            return result

        setattr(dist, name, new_function)

    def patch_files(self):
        """write: which files below the working directory are written anew."""
        here = f"{Path.cwd()}{os.sep}"
        save = torch.save

        def note(path):
            path = resolve(path)
            if path.startswith(here) and "__pycache__" not in path:
                name = path.removeprefix(here)
                self.write("write", file=name, at=self.where())

        def watch(event, args):  # of every open() in Python
            if event == "open" and not self.busy and isinstance(args[0], str):
                mode = args[1]
                if isinstance(mode, str) and mode[:1] in ("w", "x"):
                    note(args[0])

        @functools.wraps(save)
        def new_save(what, f, *args, **kwargs):
            if isinstance(f, (str, os.PathLike)):  # which is opened in C++
                note(f)
            return save(what, f, *args, **kwargs)

        sys.addaudithook(watch)
        torch.save = new_save

    def end(self):
        """last, end: the weights at the end of the training, and the script's files."""
        with self.quietly():
            if self.steps > DETAILED:
                for number, optimizer in self.optimizers.values():
                    weights = {
                        name: sketch(p) for name, p in self.parameters(optimizer)
                    }
                    self.write("last", optimizer=number, weights=weights)
            files = [getattr(m, "__file__", None) for m in [*sys.modules.values()]]
            files = [f for f in files if f and f.startswith(self.folder)]
            files = [
                f for f in files if f not in self.ours and "site-packages" not in f
            ]
            owned = {
                id(p)
                for _, o in self.optimizers.values()
                for _, p in self.parameters(o)
            }
            unowned = [
                name
                for model in self.models.values()
                for name, p in model.named_parameters()
                if has_gradient(p) and id(p) not in owned
            ]
            self.write("end", files=files, unowned=unowned)
        self.busy = True


class Operations(TorchDispatchMode):
    """Writes the output of each operation for each sample; the samples can be gathered.

    A row is noted by its sum, its norm and its length, which do not depend on the order
    of its numbers: another rank's samples can come in another order.
    """

    def __init__(self, recorder):
        super().__init__()
        self.recorder, self.samples, self.calls = recorder, None, Counter()

    def watch(self, samples):
        if self.samples is None:
            self.__enter__()
        self.samples = samples

    def stop(self):
        if self.samples is not None:
            self.__exit__(None, None, None)
        self.recorder.mode = None

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        if self.recorder.busy or hasattr(output, "placements"):
            return output
        name, at = function.overloadpacket.__name__, self.recorder.where()
        self.calls[name, at] += 1
        with self.recorder.quietly():
            for x in tensors_in(output)[:1]:
                kept, x = rows_of(x, self.samples)
                if kept:
                    numbers = x.sum(dim=1).tolist(), x.norm(dim=1).tolist()
                    rows = [list(row) for row in zip(kept, *numbers, strict=True)]
                    call, width = self.calls[name, at], x.shape[1]
                    self.recorder.write(
                        "operation", name=name, at=at, call=call, width=width, rows=rows
                    )
        return output


# ---- small questions -----------------------------------------------------------------
@functools.cache
def resolve(file):
    return str(Path(file).resolve())


def index_below_subsets(dataset, index):
    """Return the samples' numbers in the data set that the subsets were taken from."""
    try:
        index = [int(i) for i in index]
        while isinstance(dataset, Subset):
            index = [int(dataset.indices[i]) for i in index]
            dataset = dataset.dataset
        return index
    except (TypeError, ValueError, IndexError):
        return None


def rows_of(x, samples):
    """Return the samples to be noted, and their rows of an output, [samples, numbers].

    There are none if it has no floating-point row for each sample.
    """
    fits = x.dim() and x.shape[0] == len(samples) and x.numel()
    if not fits or not x.is_floating_point():
        return [], x
    few = len(samples) <= ROWS
    kept = [i for i, h in enumerate(samples) if few or h % 4 == 0]
    x = x.detach().double().reshape(len(samples), -1)[kept]
    return [samples[i] for i in kept], x


def without_wrapper(module):
    return module.module if isinstance(module, DistributedDataParallel) else module


def find_tied(module):
    """Return the lists of names that share a parameter."""
    names = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(name)
    return [each for each in names.values() if len(each) > 1]


def has_gradient(p):
    return p.grad is not None


def is_norm(module):
    return hasattr(module, "running_mean")


def synchronizes(module):
    """Return whether a wrapper will average the gradients of this forward pass."""
    if isinstance(module, DistributedDataParallel):
        return bool(module.require_backward_grad_sync)
    if hasattr(module, "_get_fsdp_state"):
        group = getattr(module._get_fsdp_state(), "_fsdp_param_group", None)
        return bool(getattr(group, "reduce_grads", True))
    return True


def simple_options(group):
    """Return the numbers of a parameter group, such as its learning rate."""
    options = {"parameters": len(group["params"])}
    for name, value in group.items():
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if name != "params" and isinstance(value, (int, float, bool)):
            options[name] = value
    return options
