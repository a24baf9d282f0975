"""What the checks share: recording the collectives of a rank, and comparing tensors.

A check is a module with these names; `answer` is the reader's module, and `rank` is the
rank that runs, one of RANKS processes with gloo:

    SOLVED             two sentences: what the real one does beyond this piece, and
                       where it stands in torch
    check(answer, rank)   asserts, each with a message that names the mistake
    PHASES             in place of check: a list of such functions. Each runs in new
                       processes, in the same working folder, after the one before it;
                       one with the decorator `killed` may end in the kill of a rank

All ranks run the whole check, and the message of the lowest that fails is shown. A rank
that has failed takes part in nothing more, and the others may then wait in vain.
"""

from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

from harness.counting import Count
from harness.counting import collective_of
from harness.counting import tensors_of

RANKS = 3


class Call(NamedTuple):
    """One call of a collective.

    name: as in torch.distributed ("all_reduce", "send", ...), or "wait" for the wait()
    of one, which those that are not asynchronous also call; numel, bytes: of what this
    rank gives to it, for "recv" of what it gets, for "barrier" and "wait" 0; group: the
    ranks that take part, as numbers of the whole, for "wait" (); peer: the one to which
    it sends, or from which it receives.
    """

    name: str
    numel: int = 0
    bytes: int = 0
    group: tuple = ()
    peer: int | None = None


class Recording(Count):
    """Notes what a block of code, and the backward passes in it, call on this rank.

    with Recording() as recording:
        model(batch).sum().backward()
    recording.events    # [Call("all_reduce", 105, 840, (0, 1, 2)), Call("wait")]
    recording.calls     # the same without the waits

    It sees each call at the level of the operations that torch carries out, however the
    answer imported it: those of object collectives, DDP and FSDP2 as well.
    """

    @classmethod
    def _should_skip_dynamo(cls):
        return False  # otherwise the first operation imports torch._dynamo: seconds

    def __init__(self):
        super().__init__()
        self.events = []
        self.works = []  # to keep them: gloo does not end a message that nobody keeps

    @property
    def calls(self):
        return [event for event in self.events if event.name != "wait"]

    def of(self, *names):
        """Return the calls with one of these names."""
        return [call for call in self.calls if call.name in names]

    def __enter__(self):
        self.patches = [self.patch_wait(dist.Work), self.patch_wait(torch._C.Future)]
        return super().__enter__()

    def __exit__(self, *error):
        for patch in self.patches:
            patch.stop()
        return super().__exit__(*error)

    def patch_wait(self, kind):
        wait = kind.wait

        def noting(*args, **kwargs):
            self.events.append(Call("wait"))
            return wait(*args, **kwargs)

        patch = mock.patch.object(kind, "wait", noting)
        patch.start()
        return patch

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation in (torch.ops.c10d.send.default, torch.ops.c10d.recv_.default):
            assert args[2] < RANKS, (
                f"there is no rank {args[2]}: the last is {RANKS - 1}"
            )
        return super().__torch_dispatch__(operation, types, args, kwargs)

    def note(self, operation, args, result):
        if name := collective_of(operation):
            self.works.append(result)
            group = ranks_of(args)
            peer = group[args[2]] if name in ("send", "recv") else None
            self.events.append(Call(name, *sizes(name, args), group, peer))


def sizes(name, args):
    """Return how many numbers, and bytes, this rank gives to a collective."""
    given = tensors_of(args)[-1:] if name != "barrier" else []
    tensors = [tensor for group in given for tensor in group]
    return sum(t.numel() for t in tensors), sum(t.nbytes for t in tensors)


def ranks_of(args):
    """Return the ranks of the process group among the arguments of an operation."""
    for each in args:
        if isinstance(each, torch.ScriptObject) and "ProcessGroup" in str(each._type()):
            group = dist.ProcessGroup.unbox(each)
            return tuple(dist.get_process_group_ranks(group))
    return ()


def killed(phase):
    """Declare that a phase may end in the kill of a rank.

    A rank that dies there, by os.kill(os.getpid(), signal.SIGKILL), is no failure. The
    others run until they end, fail or wait in vain, and are killed, too. An error of
    theirs after it counts only if it is an AssertionError.
    """
    phase.killed = True
    return phase


def difference(ours, right):
    """Return the largest difference between two tensors of the same shape, or inf."""
    if not torch.is_tensor(ours) or ours.shape != right.shape:
        return float("inf")
    if not right.numel():
        return 0.0
    return (ours.double() - right.double()).abs().max().nan_to_num(float("inf")).item()


def on_all_ranks(part, *args):
    """Call a part of a check, and fail on all ranks if it fails on one.

    So what is wrong on rank 1 is said before what rank 0 would find in a later part.
    """
    said = [None] * RANKS
    try:
        part(*args)
        mine = None
    except AssertionError as error:
        mine = str(error)
    dist.all_gather_object(said, mine)
    for text in said:
        assert text is None, text
