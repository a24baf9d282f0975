"""The pieces of exercises/: the stub is refused, the solution and those in AS_GOOD are
not, and each wrong answer in MISTAKES is refused with words of its own. What check.py
does with an answer that hangs, fails, ends its process or is ended leaves no process
behind.
"""

import shutil
import signal

import pytest

from harness import commands
from harness.stages import ROOT
from tests.training import replace_once

FOLDER = ROOT / "exercises"
PIECES = sorted(path.stem for path in FOLDER.glob("*.py") if path.name != "check.py")

# {piece: [(a text of the solution, what replaces it, ..., what the check then says)]}
MISTAKES = {
    "accumulate": [
        (
            "contextlib.nullcontext() if last else ddp.no_sync()",
            "contextlib.nullcontext()",
            "the gradients are all-reduced 2 times",
        ),
        (  # no_sync around the backward pass only
            "with contextlib.nullcontext() if last else ddp.no_sync():\n"
            "            outputs = ddp(inputs)\n",
            "outputs = ddp(inputs)\n"
            "        with contextlib.nullcontext() if last else ddp.no_sync():\n",
            "with their forward pass",
        ),
        (
            "contextlib.nullcontext() if last else ddp.no_sync()",
            "ddp.no_sync()",
            "the gradients are not all-reduced",
        ),
        ("ddp(inputs)", "ddp.module(inputs)", "the gradients are not all-reduced"),
        ("    dist.all_reduce(count)\n", "", "the gradient is 3 times too large"),
        (
            "loss * dist.get_world_size() / count",
            "loss / count",
            "3 times too small: DDP also divides",
        ),
        (
            "loss * dist.get_world_size() / count",
            "loss / len(targets) / len(micro_batches)",
            "a mean of means of the micro-batches",
        ),
        (
            "loss * dist.get_world_size() / count",
            "loss / len(targets)",
            "a sum of means of the micro-batches",
        ),
        (
            "loss * dist.get_world_size() / count",
            "loss / sum(len(targets) for _, targets in micro_batches)",
            "a mean over the ranks, as if each had",
        ),
        (
            "(loss * dist.get_world_size() / count)",
            "loss",
            "a sum over the samples: divide",
        ),
        (
            "(loss * dist.get_world_size() / count).backward()",
            "kept = loss * 3 / count + (0 if number == 1 else kept)\n"
            "            last and kept.backward()",
            "the activations of both are in memory",
        ),
        (
            "    for number, (inputs",
            "    micro_batches = [[*map(torch.cat, zip(*micro_batches))]]\n"
            "    for number, (inputs",
            "the forward passes have [4] samples, and not [2, 2]",
        ),
        (
            "dist.all_reduce(count)",
            "found = [None] * 3\n"
            "    dist.all_gather_object(found, count)\n"
            "    count = sum(found)",
            "all_gather is called: for the number of samples",
        ),
        ("outputs = ddp", "ddp.zero_grad()\n            outputs = ddp", "is off by"),
        (
            "        last = ",
            "        dist.all_reduce(count.clone())\n        last = ",
            "there are 3 all-reduces, of [1, 1, 1] numbers",
        ),
        ('reduction="sum"', 'reduction="mean"', "the gradient is off by"),
        ("number == len(micro_batches)", "number == 1", "added, or changed, after"),
        (
            "(loss * dist.get_world_size() / count).backward()",
            "loss.backward()\n"
            "            for weight in ddp.parameters():\n"
            "                weight.grad *= dist.get_world_size() / count",
            "is something left out, or multiplied more than once",
        ),
    ],
    "column_row": [
        (
            "gradient = gradient.clone()",
            "pass",
            "Copy's backward() sums into the gradient that it is given",
        ),
        (
            "        dist.all_reduce(gradient)\n",
            "",
            "Copy's backward() returns this rank's gradient",
        ),
        (
            "dist.all_reduce(gradient)",
            "dist.all_reduce(gradient)\n        gradient /= 3",
            "returns the mean of the ranks' gradients",
        ),
        ("total = part.clone()", "total = part", "Sum's forward() changes the tensor"),
        (
            "        return gradient  # total",
            "        gradient = gradient.clone()\n"
            "        dist.all_reduce(gradient)\n"
            "        return gradient  # total",
            "Sum's backward() sums the gradients",
        ),
        (
            "        part = nn.functional.linear(units, self.weight)\n"
            "        return Sum.apply(part) + self.bias",
            "        part = nn.functional.linear(units, self.weight, self.bias)\n"
            "        return Sum.apply(part)",
            "y has it 3 times",
        ),
        (
            "return Sum.apply(part) + self.bias",
            "return Sum.apply(part)",
            "Row does not add its bias",
        ),
        ("[dist.get_rank()].clone()", "[dist.get_rank()]", "clone the part"),
        (
            "nn.functional.linear(Copy.apply(inputs), self.weight, self.bias)",
            "nn.functional.linear(inputs, self.weight, self.bias)",
            "so it goes through Copy",
        ),
        (
            "mine(linear.weight, dim=0)",
            "mine(linear.weight, dim=1)",
            "Column.weight is",
        ),
        ("mine(linear.weight, dim=1)", "mine(linear.weight, dim=0)", "Row.weight is"),
        (
            "nn.Parameter(linear.bias.detach().clone())",
            "nn.Parameter(mine(linear.bias, dim=0))",
            "Row.bias is [3] on rank 0, not [7]",
        ),
        (
            "nn.Parameter(linear.bias.detach().clone())",
            "linear.bias",
            "copy it",
        ),
        ("[dist.get_rank()].clone()", "[-dist.get_rank()].clone()", "has not the numb"),
        (
            "return Sum.apply(part) + self.bias",
            "units = [torch.empty_like(part) for _ in range(3)]\n"
            "        dist.all_gather(units, part.detach())\n"
            "        return Sum.apply(part) + self.bias",
            "the forward pass calls all_gather",
        ),
        (
            "return nn.functional.linear(Copy.apply(inputs), self.weight, self.bias)",
            "halves = [Copy.apply(half) @ self.weight.T for half in inputs.chunk(2)]\n"
            "        return torch.cat(halves) + self.bias",
            "the backward pass has all-reduces of [10, 10] numbers",
        ),
        (
            "return Sum.apply(part) + self.bias",
            "dist.all_reduce(part)\n        return part + self.bias",
            "y does not go through Sum",
        ),
        (
            "tensor_split(dist.get_world_size(), dim)",
            "chunk(dist.get_world_size(), dim)",
            "on rank 1, not [3, 5]: is it that of tensor_split()",
        ),
        (
            "        self.bias = nn.Parameter(mine(",
            "        self.linear = [linear]\n        self.bias = nn.Parameter(mine(",
            "Column keeps the whole layer that it was given",
        ),
        (
            "return Sum.apply(part) + self.bias",
            "return Sum.apply(part + self.bias / 3)",
            "gets its whole gradient. Is it in the output once",
        ),
        (
            "return Sum.apply(part) + self.bias",
            "return Sum.apply(part if dist.get_rank() else part + self.bias)",
            "Row.bias gets no gradient on rank 1: each rank has the whole bias",
        ),
    ],
    "ddp": [
        (
            "dist.broadcast(weight.data, src=0)",
            "pass",
            "rank 1 begins with its own wei",
        ),
        (
            "dist.broadcast(weight.data, src=0)",
            "weight.requires_grad and dist.broadcast(weight.data, src=0)",
            "2.weight, which is frozen, is not that of rank 0",
        ),
        (
            "dist.broadcast(weight.data, src=0)",
            "dist.get_rank() == 0 and dist.broadcast(weight.data, src=0)",
            "rank 1 begins with its own weights",
        ),
        (
            "return self.module(*inputs)",
            "[dist.broadcast(w.data, 0) for w in self.module.parameters()]\n"
            "        return self.module(*inputs)",
            "forward() calls broadcast",
        ),
        (
            "return self.module(*inputs)",
            "return inputs[0]",
            "forward() does not return",
        ),
        ("numbers /= dist.get_world_size()", "pass", "is the sum over the 3 ranks"),
        (
            "missing = len(bucket)  # for",
            "pass  # for",
            "step 2 has 0 all-reduces, not 3",
        ),
        ("work.wait()", "pass", "waits for 0 of its 3 all-reduces"),
        (
            "(numbers, async_op=True)",
            "(numbers)",
            "no attribute 'wait' (ddp.py, line 50:",
        ),
        (
            "async_op=True)\n",
            "async_op=True)\n                work.wait()\n",
            "backward() waits for an all-reduce",
        ),
        (
            "if sum(each.numel() for each in buckets[-1]) >= bucket_size:",
            "if buckets[-1]:",
            "12 all-reduces for 12 weights: there are no buckets",
        ),
        (
            "if sum(each.numel() for each in buckets[-1]) >= bucket_size:",
            "if False:",
            "the buckets have [231] numbers, and not [63, 84, 84]",
        ),
        (
            "for each in buckets[-1]) >= bucket_size",
            "for each in [*buckets[-1], weight]) > bucket_size",
            "the buckets have [63, 48, 42, 42, 36] numbers",
        ),
        ("reversed(", "list(", "take the weights in reverse"),
        (
            "dist.all_reduce(numbers, async_op=True)",
            'type("Later", (), {"wait": lambda _: dist.all_reduce(numbers)})()',
            "nothing is sent before finish()",
        ),
        (
            "work = dist.all_reduce(numbers, async_op=True)\n"
            "                self.pending.append((work, numbers, bucket))",
            "self.ready = [*getattr(self, 'ready', []), (numbers, bucket)]\n"
            "                for some, weights in self.ready[2:] and self.ready:\n"
            "                    work = dist.all_reduce(some, async_op=True)\n"
            "                    self.pending.append((work, some, weights))",
            "3 all-reduces begin after the last gradient, not 1",
        ),
        (
            "self.pending.clear()",
            "pass",
            "is the list of those that are pending emptied",
        ),
        ("if w.requires_grad]", "]", "cannot register a hook on a tensor"),
        (
            "if w.requires_grad]",
            "]",
            "weight.register",
            "weight.requires_grad and weight.register",
            "with a frozen weight, the buckets have [63, 84] numbers",
        ),
        (
            "weight.grad.copy_(",
            "weight.grad + (",
            "step 1: the gradient of 0.weight is o",
        ),
        (">= bucket_size", "> bucket_size", "as soon as one has at least 63"),
        (
            "gradient_is_there(_)",
            "gradient_is_there(weight)",
            "            missing -= 1\n            if missing == 0:\n",
            "            if weight is bucket[-1]:\n",
            "a gradient of this bucket is not there yet (ddp.py",
        ),
        (  # the same, of those that do have a gradient
            "gradient_is_there(_)",
            "gradient_is_there(weight)",
            "            missing -= 1\n            if missing == 0:\n",
            "            if weight is bucket[-1]:\n",
            "[weight.grad.flatten() for weight in bucket]",
            "[(w if w.grad is None else w.grad).flatten() for w in bucket]",
            "step 1: the gradient of 3.weight is off",
        ),
        (
            "numbers /= dist",
            "numbers /= 3 * dist",
            "3 times too small: is it divided by the number of ranks twice?",
        ),
    ],
    "evaluate": [
        ("    dist.all_reduce(sums)\n", "", "rank 0 calls no all-reduce"),
        (
            "    for inputs",
            "    if not batches:\n        return 0.0, 0.0\n    for inputs",
            "rank 2, whose shard is empty, calls no all-reduce",
        ),
        ("(3, dtype=torch.float64)", "(3)", "the sums are not in float64"),
        ("    model.eval()\n", "", "the model is in training mode, with dropout"),
        ("@torch.no_grad()\n", "", "activations are kept"),
        (
            "dist.all_reduce(sums)",
            "sums /= sums[2].clamp(min=1)\n    dist.all_reduce(sums)",
            "the loss is the mean of the means of the ranks that have samples",
        ),
        (
            "sums[2] += len(targets)",
            "sums[2] += len(targets)\n        dist.all_reduce(sums)",
            "3 all-reduces: put the sums into one tensor, and reduce that",
        ),
        (
            "dist.all_reduce(sums)",
            "[dist.all_reduce(each) for each in sums]",
            "3 all-reduces: put the sums into one tensor",
        ),
        (
            "dist.all_reduce(sums)",
            "found = [None] * 3\n"
            "    dist.all_gather_object(found, sums)\n"
            "    sums = sum(found)",
            "all_gather is called: one all-reduce of sums is enough",
        ),
        (
            "dist.all_reduce(sums)",
            "dist.reduce(sums, 0)",
            "reduce is called: one all-r",
        ),
        (
            "    dist.all_reduce(sums)\n    loss, correct, count = sums.tolist()\n",
            "    loss, correct, count = sums.tolist()\n    dist.all_reduce(sums)\n",
            "rank 0: the loss is that of this rank's shard alone",
        ),
        (
            "loss / count, correct / count",
            "sums[0] / sums[2], sums[1] / sums[2]",
            "rank 0 returns a Tensor, and not a float",
        ),
        ("correct / count", "100 * correct / count", "the accuracy is a percentage"),
        (
            'reduction="sum"',
            'reduction="mean"',
            "the sum of the batches' means, divided",
        ),
        ("sums[2] += len(targets)", "sums[2] += 1", "rank 0: the loss is "),
        ("len(targets)", "inputs.numel()", "rank 0: the loss is "),
        ("    model.train(was_training)\n", "", "and is given back in evaluation mode"),
        ("(was_training)", "()", "came in evaluation mode, and is given back in tr"),
        (
            "    dist.all_reduce(sums)\n",
            "    if sums[2] > 0:\n        dist.all_reduce(sums)\n",
            "rank 2, whose shard is empty, calls no all-reduce, and then divides by 0",
        ),
        (
            "torch.zeros(3, dtype=torch.float64)",
            "torch.zeros(3)",
            "    dist.all_reduce(sums)",
            "    sums = sums.double()\n    dist.all_reduce(sums)",
            "about as exact as float32: are all sums float64?",
        ),
    ],
    "fsdp": [
        (
            "        outputs = self.block[0](inputs)\n        self.free()\n",
            "        outputs = self.block[0](inputs)\n",
            "resize the storages of other blocks",
        ),
        (
            "            weight.grad = None\n        self.free()\n",
            "            weight.grad = None\n",
            "of the blocks after it",
        ),
        (
            "            weight.grad = None\n        self.free()\n",
            "            pass\n        self.free()\n",
            "holds",
        ),
        (
            " / self.ranks\n        mine",
            "\n        mine",
            "divide",
        ),
        ("outputs.register_hook(self.gather)", "pass", "gather before it"),
        (
            "            weight.untyped_storage().resize_(weight.numel()"
            " * weight.element_size())\n"
            "            weight.data.copy_(values.view_as(weight))  #"
            " .data: autograd need not know",
            "            weight.data = values.view_as(weight)",
            "resize the storage that the weight had in the forward pass",
        ),
        (
            "values, whole = whole.tensor_split([weight.numel()])",
            "shape = self.shapes[weight]\n"
            "            values, whole = whole.tensor_split([shape.numel()])",
            "weight.untyped_storage().resize_(weight.numel() * weight.element_size())",
            "weight.data = values.view(shape)",
            "weight.data.copy_(values.view_as(weight))",
            "",
            "def free(self):\n",
            "def free(self):\n"
            "        self.shapes = {weight: weight.shape for weight in self.weights}\n",
            "weight.untyped_storage().resize_(0)",
            "weight.data = weight.new_empty(0)",
            "because autograd keeps their tensors",
        ),
        (
            "self.block = [block]",
            "self.block = nn.ModuleList([block])",
            "has 5 parameters",
        ),
        ("chunk(self.ranks)\n", "chunk(self.ranks)[::-1]\n", "numbers of piece 0"),
        ("[dist.get_rank()].clone()", "[dist.get_rank()]", "clone it"),
        (
            "        dist.reduce_scatter_tensor(mine, gradients)",
            "        dist.all_reduce(gradients)\n"
            "        mine = gradients.chunk(self.ranks)[dist.get_rank()]",
            "by an all-reduce in the backward pass",
        ),
        (
            "        dist.reduce_scatter_tensor(mine, gradients)",
            "        mine = gradients.chunk(self.ranks)[dist.get_rank()]",
            "calls 0 reduce-scatters, not 3",
        ),
        (
            "        self.waiting = len(self.weights)\n        gradients",
            "        gradients",
            "calls",
        ),
        (
            "        self.free()\n\n    def flat",
            "\n    def flat",
            "resize the storages of its parameters to 0 in __init__()",
        ),
        (
            "        self.gather()\n        outputs",
            "        self.gather()\n        self.gather()\n        outputs",
            "calls 6 all-gathers, not 3",
        ),
        (
            "mine if self.piece.grad is None else self.piece.grad + mine",
            "mine",
            "is it added to the .grad that is there?",
        ),
        (
            "if outputs.requires_grad:",
            "if True:",
            "cannot register a hook on a tensor that doesn't require gradient (fsdp.py",
        ),
    ],
    "pipeline": [
        (
            "ahead = min(stages - 1 - stage, count)",
            "ahead = count",
            "7 are in flight at once, not 3",
        ),
        (
            "ahead = min(stages - 1 - stage, count)",
            "ahead = min(stages - stage, count)",
            "4 are in flight at once, not 3",
        ),
        (
            "ahead = min(stages - 1 - stage, count)",
            "ahead = min(max(stages - 2 - stage, 0), count)",
            "the order is F0 F1 B0",
        ),
        (
            "ahead = min(stages - 1 - stage, count)",
            "ahead = stages - 1 - stage",
            "StopIteration: with 1 micro-batches for 3 stages: no more forward passes",
        ),
        (
            " / count  # the",
            "  # the",
            "the sum over the micro-batches, not their mean",
        ),
        (
            "    for work in dist.batch_isend_irecv(operations):\n        work.wait()",
            "    works = [each.op(each.tensor, each.peer) for each in operations]\n"
            "    for work in works:\n        work.wait()",
            "with nccl, the stages wait for each other forever",
        ),
        (
            "    for work in dist.batch_isend_irecv(operations):\n        work.wait()",
            "    for each in operations:\n"
            "        name = each.op.__name__.removeprefix('i')\n"
            "        getattr(dist, name)(each.tensor, each.peer)",
            "a message needs two ranks: does the other begin it before it waits",
        ),
        (
            "    for work in dist.batch_isend_irecv(operations):\n        work.wait()",
            "    dist.batch_isend_irecv(operations)",
            "times wait()",
        ),
        ("x, y = kept.popleft()", "x, y = kept.pop()", "the order is F0 F1 F2 B2"),
        (
            "kept.append((x, y))",
            "kept.append((x, y))\n"
            "        part.outputs_of_all = [*getattr(part, 'outputs_of_all', []), y]",
            "outputs are still there",
        ),
        ("else x.requires_grad_()", "else x", "call requires_grad_() before the part"),
        (
            "        y.backward(gradient)",
            "        part.zero_grad()\n        y.backward(gradient)",
            "the gradients are off",
        ),
        (
            "        return x.grad\n",
            "        dist.barrier()\n        return x.grad\n",
            "waits in barrier",
        ),
    ],
    "resume": [
        (
            "    dist.barrier()  # otherwise rank 0 publishes a folder to which others"
            " still write\n",
            "",
            "checkpoint",  # who is first, decides what is found
        ),
        (
            'folder / f"unfinished-{step}"  #',
            'folder / f"step-{step:09}"  #',
            "after rank 1 was killed while it saved step 12, load() begins with half",
        ),
        (
            'f"step-{step:09}"',
            'f"step-{step}"',
            "is of step 10; does it sort names as text",
        ),
        (
            'latest[0] / f"random-{dist.get_rank()}.pt"',
            'latest[0] / "random-0.pt"',
            "load() gives rank 1 the random numbers of rank 0",
        ),
        (
            'unfinished / f"random-{dist.get_rank()}.pt"',
            'unfinished / "random-0.pt"',
            "random",
        ),
        (
            '    optimizer.load_state_dict(state["optimizer"])\n',
            "",
            "rank 0 does not have the optimizer's state of step 10",
        ),
        (
            '    scheduler.load_state_dict(state["scheduler"])\n',
            "",
            "rank 0 does not have the scheduler's state of step 10",
        ),
        (
            '    model.load_state_dict(state["model"])\n',
            "",
            "rank 0 does not have the weights of step 10",
        ),
        (
            "    torch.set_rng_state(random)\n",
            "",
            "rank 0 does not have the random numbers of step 10",
        ),
        (
            '    return state["step"]',
            '    return state["step"] + 1',
            "load() returns 11",
        ),
        (
            "    if latest[0] is None:\n        return 0\n",
            "",
            "load",
        ),
        (
            "    if dist.get_rank() == 0:  # the rest is the same on all ranks:"
            " one copy is enough",
            "    for _ in range(1):",
            "what is the same on all ranks is written by one",
        ),
        (
            "    unfinished.mkdir(",
            '    for old in folder.glob("step-*"):\n'
            "        if dist.get_rank() == 0:\n"
            '            old.rename(folder / f"old-{old.name}")\n'
            "    unfinished.mkdir(",
            "load() returns 0, but the latest complete checkpoint is of step 10",
        ),
        (
            '            "step": step,\n',
            '            "step": step, "random": torch.rand(1),\n',
            "save() changes the random numbers on rank 0",
        ),
        (  # also where random numbers are sent, which pickles them with torch.save
            "    unfinished.mkdir(",
            "    dist.all_gather_object([None] * 3, torch.get_rng_state())\n"
            "    unfinished.mkdir(",
            "        unfinished.rename(",
            '        if old := max(folder.glob("step-*"), default=None):\n'
            '            (old / "shared.pt").unlink()\n'
            "        unfinished.rename(",
            "load() begins with half of a checkpoint, on rank 0: FileNotFoundError",
        ),
        (
            "import torch\nimport",
            "import shutil\n\nimport torch\nimport",
            "unfinished.rename(folder",
            "shutil.copytree(unfinished, folder",
            "is a file copied? A copy can be cut off in the middle",
        ),
    ],
    "ring": [
        (
            "    rank, n = ",
            "    return dist.all_reduce(tensor)\n    rank, n = ",
            "all_reduce is called: the ring is made of messages only",
        ),
        (
            "right, left",
            "left, right",
            "rank 0 sends to rank 2: in the ring it sends only",
        ),
        (
            "sending = dist.isend(outgoing, right)",
            "dist.send(outgoing, right)",
            "wait in send (line 19: dist.send(outgoing, right)): a message needs two",
        ),
        ("        sending.wait()\n", "", "rank 0 waits for 4 of 8 messages"),
        ("incoming.copy_(received)", "incoming += received", "are larger than the sum"),
        ("step < n - 1", "step < n", "are larger than the sum"),
        ("tensor_split(n)", "chunk(n)", "[4, 2, 4, 4] numbers of a tensor of [10]"),
        ("range(2 * (n - 1))", "range(n - 1)", "sends 2 messages: 2 (n - 1) are 4"),
        (
            "incoming += received",
            "incoming = incoming + received",
            "are not the sum of a",
        ),
        (".view(-1)", ".flatten().clone()", "the sums belong into it, in place"),
        (
            "tensor.view(-1).tensor_split(n)",
            "[tensor.view(-1)] * n",
            "rank 0 sends 48 numbers of a tensor of 12",
        ),
        (
            "incoming.copy_(received)",
            "incoming.copy_(received)\n    tensor /= n",
            "these are the means",
        ),
        ("(rank - step) % n", "(rank + step) % n", "are larger than the sum"),
        (
            "(rank + 1) % n",
            "rank + 1",
            "there is no rank 3: the last is 2 (ring.py, li",
        ),
        (  # the last chunk gets the remainder
            "tensor.view(-1).tensor_split(n)",
            "tensor.view(-1).split([tensor.numel() // n] * (n - 1)"
            " + [tensor.numel() - tensor.numel() // n * (n - 1)])",
            "numbers of a tensor of [11]: their sizes differ by one number at most",
        ),
        (  # no chunk gets it
            "tensor.view(-1).tensor_split(n)",
            "tensor.view(-1).split(tensor.numel() // n)",
            "1 of the 10 numbers of rank 0 are what they were: is every number in a ch",
        ),
        (
            "tensor.view(-1).tensor_split(n)",
            "tensor.tensor_split(n)",
            "numbers of a tensor of [2, 4]: their sizes differ by one number",
        ),
        (
            "torch.empty_like(incoming)",
            "torch.empty_like(outgoing)",
            "by SIGABRT (line 20: dist.recv(received, left)): have the two tensors of",
        ),
    ],
    "sampler": [
        ("self.seed + self.epoch", "self.seed", "has the order of epoch 0"),
        ("self.epoch = epoch", "pass", "has the order of epoch 0"),
        ("self.seed + self.epoch", "self.epoch", "does not use the seed"),
        ("self.seed + self.epoch", "self.seed * 7 + self.epoch", "rank 0 has ["),
        (
            "self.seed + self.epoch",
            "self.seed + self.epoch + self.rank",
            "rank 1 has an order of its own",
        ),
        ("if self.shuffle:", "if not self.shuffle:", "rank 0 shuffles although"),
        ("if self.shuffle:", "if False:", "rank 0 does not shuffle"),
        ("torch.Generator()", "torch", "torch's global generator has changed"),
        (
            "self.rank, None, self.n",
            "self.rank * self.size, (self.rank + 1) * self.size",
            "rank 0 has a block of the order",
        ),
        ("(whole, self.rank, None, self.n)", "(whole, None)", "rank 0 has all indices"),
        (".tolist()", "", "an index is of the type Tensor, and not an int"),
        ("+ self.n - 1", "", "len() is 3 on rank 0, and not 4: length 10,"),
        (
            "self.length if drop_last else rounded_up",
            "rounded_up",
            "len() is 4 on rank 0, and not 3: length 10,",
        ),
        (
            "itertools.cycle(order)",
            "itertools.chain(order, order)",
            "rank 2 has [], and not [0]: length 1,",
        ),
        (
            "itertools.cycle(order)",
            "itertools.chain(order, itertools.repeat(order[-1]))",
            "rank 1 has [1, 4, 7, 9], and not [1, 4, 7, 0]: length 10,",
        ),
        (
            "generator=generator).tolist()",
            "generator=generator)\n"
            "            dist.broadcast(order, 0)\n"
            "            order = order.tolist()",
            "the sampler calls broadcast",
        ),
        ("len(dataset)", "sum(1 for _ in dataset)", "sample 0 is read"),
        (
            "        return itertools.islice(whole, self.rank",
            "        itertools.islice(whole, self.rank",
            "when the check used what your code returned; checks/sampler.py, line",
        ),
    ],
    "zero1": [
        (
            "torch.optim.AdamW([self.piece], **options)",
            "torch.optim.AdamW(self.weights, **options)",
            "keeps state for all 170 weights: give it only its piece",
        ),
        ("nn.Parameter(piece.clone())", "nn.Parameter(piece)", "vector of 171 numbers"),
        (
            " / self.ranks\n        self.piece.grad",
            "\n        self.piece.grad",
            "divide",
        ),
        (
            "dist.reduce_scatter_tensor(self.piece.grad, gradients)",
            "dist.all_reduce(gradients)\n"
            "        self.piece.grad = gradients.chunk(self.ranks)[dist.get_rank()]",
            "sum of 171 numbers by an all-reduce",
        ),
        (
            "self.piece.grad = torch.empty_like(self.piece)\n"
            "        dist.reduce_scatter_tensor(self.piece.grad, gradients)",
            "self.piece.grad = gradients.chunk(self.ranks)[dist.get_rank()]",
            "no reduce-scatter",
        ),
        (
            "dist.all_gather_into_tensor(whole, self.piece)",
            "whole.chunk(self.ranks)[dist.get_rank()].copy_(self.piece)",
            "no all-gather",
        ),
        (
            "weight.copy_(new.view_as(weight))",
            "weight = new.view_as(weight)",
            "still the old ones",
        ),
        (
            "        self.optimizer.step()",
            "        self.optimizer.state.clear()\n        self.optimizer.step()",
            "keep its state between two steps",
        ),
        (
            "        for weight in self.weights:\n            weight.grad = None",
            "        self.optimizer.zero_grad()",
            "after zero_grad() the model's weights",
        ),
        (
            "whole = gradients  #",
            "dist.barrier()\n        whole = gradients  #",
            "also calls barrier",
        ),
        (
            "torch.optim.AdamW([self.piece]",
            "torch.optim.Adam([self.piece]",
            "the optimizer is Adam",
        ),
        (
            "chunk(self.ranks)[dist.get_rank()]",
            "chunk(self.ranks)[0]",
            "rank 1's optimizer updates other numbers than piece 1",
        ),
        (
            "nn.functional.pad(vector, (0, -len(vector) % self.ranks))",
            "vector",
            "reduce_scatter_tensor",
        ),
        (
            "self.weights = list(parameters)",
            "self.weights = list(parameters)[::-1]",
            "other numbers than piece 0 of the weights",
        ),
        (
            "weight.grad = None",
            "weight.grad.zero_()",
            "the gradients are zeros, which need as much memory",
        ),
        (
            "whole = gradients  #",
            "whole = self.whole = gradients  #",
            "rank 0 keeps 228 numbers besides the model",
        ),
        (
            "**options)\n\n    def flat",
            'lr=options["lr"])\n\n    def flat',
            "the optimizer's betas is (0.9, 0.999), not (0.8, 0.9): hand on all",
        ),
    ],
}
# {piece: (a text of the solution, what replaces it)}: as right as the solution
AS_GOOD = {
    "pipeline": ("return y.detach()", "return y"),
    "zero1": (
        "        self.optimizer.step()\n",
        "        self.optimizer.step()\n        self.piece.grad = None\n",
    ),
}
# {what an answer does when it is loaded: what the check says of it}
ODD = {
    "import sys; sys.exit(3)": "Not solved yet: SystemExit: 3 (ring.py, line 1: import",
    "import os; os._exit(3)": "rank 0 ended its process, with exit code 3",
    "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)": "was ended by SIGSEGV",
    "raise KeyboardInterrupt": "KeyboardInterrupt (ring.py, line 1: raise Keyb",
    "def all_reduce(tensor:": "SyntaxError: '(' was never closed (ring.py, line 1: def",
    "import nothing": "No module named 'nothing' (ring.py, line 1: import nothing)",
    "answer = 42": "ring.py has no all_reduce: keep the stub's names",
    "def all_reduce(tensor): return tensor.nothing": "AttributeError: 'Tensor'",
    "def all_reduce(tensor): print(10**5 * 'words\\n')": "rank 0 sends nothing",
}
LOOP = "import torch.distributed as dist\nwhile dist.get_rank() == 1: pass\n"


@pytest.fixture
def run(tmp_path):
    """Return a function that checks an answer, and asserts that no process is left."""

    def run(name, text, code):
        path = tmp_path / f"{name}.py"
        path.write_text(text)
        command = f"python exercises/check.py {name} {path}"
        with commands.start(command, tmp_path / "run", forks=True) as job:
            done = job.wait()
            assert not job.members()
        assert (done.returncode, done.stderr) == (code, "")
        return done.stdout

    return run


def test_each_piece_has_all_its_files():
    assert len(PIECES) == 10
    for folder in ("checks", "solutions"):
        names = {path.stem for path in (FOLDER / folder).glob("*.py")} - {"__init__"}
        assert names == {*PIECES}
    assert {*MISTAKES} == {*PIECES}
    assert min(map(len, MISTAKES.values())) >= 8
    table = (FOLDER / "README.md").read_text()
    assert all(f"| [{name}]({name}.py) |" in table for name in PIECES)


@pytest.mark.parametrize("name", PIECES)
def test_the_solution_is_right_and_has_the_stubs_names(name, run):
    said = run(name, (FOLDER / "solutions" / f"{name}.py").read_text(), 0)
    assert said.startswith("Solved. ") and " ".join(said.split()).count(". ") == 2


@pytest.mark.ci
@pytest.mark.parametrize("name", PIECES)
def test_the_stub_is_not_written(name, run):
    said = run(name, (FOLDER / f"{name}.py").read_text(), 1)
    assert "is not written" in said and ": raise NotImplementedError)" in said


def cases():
    """Return each mistake: the piece, what the check says, and the texts."""
    return [
        pytest.param(name, words, texts, id=f"{name}-{number}")
        for name, mistakes in MISTAKES.items()
        for number, (*texts, words) in enumerate(mistakes)
    ]


@pytest.mark.ci
@pytest.mark.parametrize("name, words, texts", cases())
def test_a_wrong_answer_is_refused_with_its_own_words(
    name, words, texts, run, tmp_path
):
    wrong = tmp_path / "wrong.py"
    pairs = zip(texts[::2], texts[1::2], strict=True)
    replace_once(FOLDER / "solutions" / f"{name}.py", *pairs, target=wrong)
    said = run(name, wrong.read_text(), 1)
    assert said.startswith("Not solved yet: ") and said.count("\n") == 1
    assert words in said


@pytest.mark.ci
@pytest.mark.parametrize("name", AS_GOOD)
def test_another_right_answer_is_right(name, run, tmp_path):
    other = tmp_path / "other.py"
    replace_once(FOLDER / "solutions" / f"{name}.py", AS_GOOD[name], target=other)
    assert run(name, other.read_text(), 0).startswith("Solved. ")


@pytest.mark.ci
@pytest.mark.parametrize("text", ODD)
def test_an_answer_that_ends_its_process_or_does_not_end_is_named(text, run):
    assert ODD[text] in run("ring", text, 1).splitlines()[-1]


@pytest.mark.release
def test_an_endless_loop_is_ended(run):
    said = run("ring", LOOP, 1)
    assert "rank 1 computes and does not end, in get_rank (line 2: while" in said


@pytest.mark.ci
def test_a_hang_says_which_ranks_wait_where(run):
    text = (FOLDER / "solutions" / "ring.py").read_text()
    said = run("ring", f"{text}    if rank == 1:\n        dist.barrier()\n", 1)
    assert "rank 1 waits in barrier (line" in said and "rank 2 waits in" in said
    text = "import torch.distributed as dist\n\n\ndef all_reduce(tensor):\n"
    said = run("ring", f"{text}    dist.get_rank() or dist.barrier()\n", 1)
    assert "rank 1 sends nothing" in said  # what is wrong comes before what it causes


@pytest.mark.ci
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_no_rank_survives_the_check(ending, tmp_path):
    path = tmp_path / "ring.py"
    path.write_text("import time\nprint('begun')\ntime.sleep(1000)\n")
    command = f"python exercises/check.py ring {path}"
    with commands.start(command, tmp_path / "run", forks=True) as job:
        job.wait_for("begun", times=3)
        ranks = job.members()
        assert len(ranks) == 4
        ranks[0].send_signal(ending)
        assert job.wait().returncode == 128 + ending
        assert not commands.alive(ranks)
        assert "Traceback" not in job.screen()


def test_a_wrong_name_or_file_is_named():
    for words in ("nothing", "ring nothing.py", "ring a b", f"ring {FOLDER}"):
        command = f"python exercises/check.py {words}"
        done = commands.run(command, code=2, forks=True)
        assert not done.stdout and done.stderr.count("\n") == 1


def copied(folder):
    """Copy exercises/ without the answers; return where it is then."""
    ignored = shutil.ignore_patterns("*.json", "__pycache__")
    copy = shutil.copytree(FOLDER, folder / "exercises", ignore=ignored)
    for path in (copy / "mine").glob("*.py"):
        path.unlink()
    return copy


def states(check):
    """Return {piece: how far the reader is}, as listed."""
    listed = commands.run(check, forks=True).stdout.partition("\n\n")[0]
    return dict(line.split()[:2] for line in listed.splitlines())


@pytest.mark.ci
def test_answers_are_listed_and_those_that_are_solved(tmp_path):
    """In a copy, because the folder `mine` is the reader's."""
    copy = copied(tmp_path)
    check = f"python {copy / 'check.py'}"
    (copy / "mine" / "ring.py").write_text((copy / "ring.py").read_text())
    assert "To begin: cp " in commands.run(f"{check} ddp", code=1, forks=True).stdout
    commands.run(f"{check} ring", code=1, forks=True)
    assert states(check)["ring"] == "begun"
    (copy / "mine" / "ring.py").write_text((copy / "solutions/ring.py").read_text())
    commands.run(f"{check} ring", forks=True)
    listed = states(check)
    assert [*listed].index("ring") < [*listed].index("ddp")  # as in README's table
    assert listed["ring"] == "solved" and listed["ddp"] == "-"
    with (copy / "mine" / "ring.py").open("a") as file:
        file.write("# and a comment\n")
    assert states(check)["ring"] == "changed"
