"""docs/faults.md, from 13 on: no kill or full disk publishes a part of a checkpoint.

A file that is missing or truncated is noticed on all ranks; a flipped bit is not.

That the stage trains the same weights, resumes on any number of processes and stops at
a signal is shown in the tests that do so for every stage; common/checkpoint.py is the
subject of test_checkpoint.py.
"""

import functools
import os
import re
import shutil
import signal

import pytest
import torch

from common import checkpoint
from harness import commands
from harness.stages import first_with
from harness.weights import max_abs_diff
from tests.conftest import only_in_release
from tests.fault_injection import late_to_clean
from tests.fault_injection import no_large_files
from tests.fault_injection import signalled_at_file
from tests.resume_harness import EVERY_4
from tests.resume_harness import Run
from tests.resume_harness import app_state
from tests.resume_harness import assert_same
from tests.resume_harness import exit_codes
from tests.resume_harness import read_state
from tests.resume_harness import resumed_from
from tests.resume_harness import step_of
from tests.resume_harness import take_step
from tests.resume_harness import uninterrupted
from tests.training import assert_one_error_line
from tests.training import load_stage
from tests.training import plain
from tests.training import small_workload
from tests.training import stage_args

STAGE = first_with("sharded_checkpoints")


def names(folder):
    return {path.name for path in folder.iterdir()}


def assert_complete(run):
    """Assert that what has a checkpoint's name can be read."""
    for path in run.paths():
        assert read_state(path)["step"] == step_of(path)


# ---- damaged ones, in one process ----------------------------------------------------
@pytest.fixture
def module():
    return load_stage(STAGE)


@pytest.fixture
def args(group, module, tmp_path):  # noqa: ARG001
    return stage_args(module, "--checkpoint-dir", tmp_path / "checkpoints")


SHARD = "__0_0.distcp"


@pytest.mark.fault(
    since="sharded_checkpoints",
    what="a bit of a shard flips, or a shard is replaced by that of another step",
    sees="no error: `resumed from step`",
    lost="the result is wrong: DCP compares no checksums",
)
@pytest.mark.parametrize("damage", ["a flipped bit", "of another step"])
def test_a_wrong_shard_is_not_noticed(damage, module, args, capsys, fault):
    first, second = (app_state(STAGE, module, args, seed) for seed in (0, 1))
    module.load_latest(args, first)
    for _ in range(2):
        take_step(first)
        module.save_checkpoint(args, first)
    latest, older = checkpoint.find(args.checkpoint_dir, sharded=True)
    shard = bytearray((latest / SHARD).read_bytes())
    if damage == "a flipped bit":
        weight = plain(next(first.model.parameters())).detach().numpy().tobytes()
        shard[shard.index(weight)] ^= 1
    else:
        shard = (older / SHARD).read_bytes()
    (latest / SHARD).write_bytes(shard)
    module.load_latest(args, second)
    fault.assert_seen(capsys.readouterr().out)
    pairs = zip(first.model.parameters(), second.model.parameters(), strict=True)
    assert not all(torch.equal(plain(one), plain(other)) for one, other in pairs)


# ---- runs that are killed ------------------------------------------------------------
# Before which event a rank is killed, in one start after the other: of a file that is
# opened, of the new name of one that is renamed, or of a folder that is removed.
KILLS = [
    ("os.rename", "*/step-*", 2),  # the second checkpoint is there, except for its name
    ("open", "*/__1_0.distcp", 1),  # rank 1 writes nothing
]
MORE_KILLS = [
    ("os.rename", "*/.metadata", 1),
    ("shutil.rmtree", "*/.step-*", 1),  # an old one is about to be removed
    ("os.remove", "__?_0.distcp", 2),  # a part of it is
    ("open", "*/step-*/.metadata", 1),  # while it loads
]


@pytest.mark.parametrize(
    "kills", [KILLS, only_in_release(MORE_KILLS)], ids=["few", "many"]
)
def test_kills_while_a_checkpoint_is_written(kills, trained, two, device, tmp_path):
    """What has a checkpoint's name is complete, and no bit of the result differs."""
    run = Run(STAGE, tmp_path, device, *EVERY_4, processes=two)
    for event, pattern, call in kills:
        kill = functools.partial(signalled_at_file, event, pattern, call=call)
        done = run.run(code=None, prepare=kill)
        assert -signal.SIGKILL in exit_codes(done), (event, pattern)
        assert resumed_from(done.stdout) in ([], [run.step])
        assert run.latest() >= run.step
        assert_complete(run)
    run.run()
    assert_same(run.out_dir, uninterrupted(trained, STAGE, two))
    run.assert_no_step_is_lost_or_doubled()
    assert names(run.checkpoint_dir) == {".lock", "step-000000016", "step-000000020"}


def test_no_rank_begins_a_save_before_rank_0_has_cleaned(two, device, tmp_path):
    run = Run(STAGE, tmp_path, device, *EVERY_4, processes=two)
    seen = tmp_path / "seen"
    run.run(prepare=functools.partial(late_to_clean, seen))
    assert seen.read_text() == ""


# ---- one rank of two -----------------------------------------------------------------
@pytest.mark.fault(
    since="sharded_checkpoints",
    what="one rank cannot write its shards because its disk is full",
    sees="`step ...: checkpoint not written (rank 1: ...)`; the training continues",
    lost="nothing: the earlier checkpoints stay, and nothing is left of this one",
)
def test_rank_1_alone_cannot_write(trained, two, device, tmp_path, fault):
    """Then no rank has written a checkpoint; training continues."""
    if device == "cuda":
        pytest.skip(
            "the limit on a file's size would stop nccl, too: its shared memory"
        )
    run = Run(STAGE, tmp_path, device, *EVERY_4, processes=two)
    run.stop(5, "SIGTERM")
    assert run.steps() == [5, 4]
    before, listed = run.files(), names(run.checkpoint_dir)
    prepare = functools.partial(no_large_files, 100_000, ranks=["1"])
    rank_0, rank_1 = run.run(prepare=prepare).ranks
    fault.assert_seen(rank_0.stdout)
    why = "rank 1: not all of it could be written; is the disk full[?]"
    pattern = rf"^step (\d+): checkpoint not written \({why}\)$"
    failed = re.findall(pattern, rank_0.stdout, re.M)
    assert failed == ["8", "10", "12", "16", "20"]
    assert not rank_1.stdout
    assert run.files() == before
    assert names(run.checkpoint_dir) == listed
    assert_same(run.out_dir, uninterrupted(trained, STAGE, two))


@pytest.mark.fault(
    since="sharded_checkpoints",
    what="a file of the latest checkpoint is missing, truncated or empty",
    sees="`skipping checkpoint ... (rank ...)`; all ranks resume from the checkpoint"
    " before",
    lost="the steps between the two, which are done again",
)
def test_a_shard_that_only_rank_1_reads_is_damaged(
    trained, two, device, tmp_path, fault
):
    """All ranks skip the checkpoint together; if all are damaged, the run ends."""
    run = Run(STAGE, tmp_path, device, *EVERY_4, processes=two)
    run.stop(7, "SIGTERM")
    latest, older = run.paths()
    os.truncate(latest / "__1_0.distcp", 1000)
    shutil.copytree(run.checkpoint_dir, tmp_path / "kept")
    done = run.run()
    fault.assert_seen(done.stdout)
    assert resumed_from(done.ranks[0].stdout) == [step_of(older)] == [4]
    (line,) = re.findall(r"^skipping .*", done.stdout, re.M)
    assert re.fullmatch(rf"skipping checkpoint {latest} \(rank \d: .+\)", line)
    assert not done.ranks[1].stdout
    assert_same(run.out_dir, uninterrupted(trained, STAGE, two))
    run.assert_no_step_is_lost_or_doubled()
    shutil.rmtree(run.checkpoint_dir)
    shutil.move(tmp_path / "kept", run.checkpoint_dir)
    (older / SHARD).unlink()
    before = run.files()
    for one in run.run(code=2).ranks:
        named = f"--checkpoint-dir: no checkpoint in {run.checkpoint_dir} can be read"
        assert_one_error_line(one, named)
    assert run.files() == before


# ---- saves in a thread ---------------------------------------------------------------
def torchrun(folder, program, *flags, code=0):
    """Run a program of the stage on two processes; return a Done."""
    command = ["torchrun", "--standalone", "--nproc-per-node=2", f"{STAGE}/{program}"]
    return commands.run([*command, *flags], folder, code, CUDA_VISIBLE_DEVICES="")


@pytest.mark.release
def test_a_kill_while_a_thread_saves(tmp_path):
    """The folder keeps its dot, and a resumed run ends as one that was never killed.

    Rank 1 is killed in the save of step 12, after it has trained to step 15.
    """
    flags = [*small_workload(STAGE, 480).flags, "--device", "cpu", "--epochs", "2"]
    flags += ["--dtype", "float64", "--checkpoint-every", "6"]
    saved = tmp_path / "saved"
    all_flags = [*flags, "--checkpoint-dir", saved]
    torchrun(tmp_path, "demos/killed_in_the_thread.py", *all_flags, code=1)
    checkpoints = {".lock", "step-000000006", "step-000000010"}
    assert names(saved) == {*checkpoints, ".step-000000012.tmp"}
    program, out = "demos/asynchronous_saves.py", ("--out-dir", tmp_path / "resumed")
    assert resumed_from(torchrun(tmp_path, program, *all_flags, *out).stdout) == [10]
    assert names(saved) == {".lock", "step-000000018", "step-000000020"}
    torchrun(tmp_path, "train.py", *flags, "--out-dir", tmp_path / "whole")
    last = [tmp_path / run / "last.pt" for run in ("resumed", "whole")]
    assert max_abs_diff(*last) == 0
