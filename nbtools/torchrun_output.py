"""What torchrun and its ranks print when a rank fails, without what varies."""

import re

from nbtools import lesson

# What differs from run to run or between machines, or is long: pattern, replacement.
CHANGING = {
    r"(?<=time      : ).*": "<time>",
    r"(?<=host      : ).*": "<host>",
    r"(?<=pid: )\d+|(?<=PID )\d+": "<pid>",
    r"(?<=WORK/logs/)[^/]+": "<run>",
    r"\[/.*Connection (closed|reset) by peer.*": "Connection <closed or reset> by peer",
    r"\[/.*(Timed out waiting|Application timeout).*": "<Timed out waiting ...>",
    r"={20,}": "=" * 60,
    r"-{20,}": "-" * 60,
    r'(    File ".*site-packages.*\n(      .*\n)+)+': "    <frames inside torch>\n",
    r"\n *[~^]+(?=\n)": "",
}


def clean(text):
    """Return a text with words such as <time> for what differs from run to run."""
    for pattern, shown in CHANGING.items():
        text = re.sub(pattern, shown, text)
    return text


def grep_log(done, pattern):
    """Show a grep in all that was printed to standard error; print its lines, sorted.

    done: what lesson.run returned. Raises commands.CommandError if no line matches.
    """
    (lesson.work / "run.log").write_text(done.stderr)
    found = lesson.run(f"grep -E '{pattern}' $WORK/run.log", quiet=True)
    print(*sorted(clean(found.stdout).splitlines()), sep="\n")


def last_lines(done):
    """Return the last line of each rank's traceback, the highest rank first.

    done: what lesson.run returned.
    """
    found = re.findall(r"\[rank\d\]: \w+Error.*", clean(done.stderr))
    return "\n".join(sorted(found, reverse=True))


def mismatch(done):
    """Return the calls that differ, as TORCH_DISTRIBUTED_DEBUG=DETAIL names them."""
    words = r"Detected mismatch between collectives|OpType=\w+, TensorShape=\[\d+\]"
    return "\n".join(sorted(set(re.findall(words, done.stderr))))


def block(done):
    """Return torchrun's summary, from the name ChildFailedError on, cleaned."""
    text = clean(done.stderr)
    start = text.index("torch.distributed.elastic.multiprocessing.errors.ChildFailed")
    return text[start:].rstrip()


def root_cause(done):
    """Return the part of torchrun's summary that is headed Root Cause."""
    text = block(done)
    return text[text.index("Root Cause") :]
