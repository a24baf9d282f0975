"""Log which signals this process gets, and one below it for each further name.

python 10_preemption/demos/log_signals.py FOLDER NAME ...

Each process appends to the file FOLDER/NAME. Nothing but SIGKILL ends them before five
minutes are over.
"""

import os
import signal
import sys
import time
from pathlib import Path


def main():
    folder, *names = sys.argv[1:]
    while len(names) > 1 and os.fork() == 0:
        names = names[1:]

    def log(number, _):
        os.write(file, f"{signal.Signals(number).name}\n".encode())

    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, log)
    # open until the end: a late signal must not create the file again
    file = os.open(Path(folder, names[0]), os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    time.sleep(300)


if __name__ == "__main__":
    main()
