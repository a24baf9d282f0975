"""`make notebooks`: run them and store their outputs, without timestamps.

python -m tools.notebooks [--show] [NOTEBOOK ...]
"""

import argparse
import contextlib
import io
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from harness.stages import fail
from harness.stages import notebooks
from nbtools import lesson
from tools import picture
from tools import stale

KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def normalize(book):
    """Remove from a notebook what differs between machines, and number its cells."""
    language = {"name": "python"}
    metadata = {"kernelspec": KERNEL, "language_info": language}
    if "ran_with" in book.metadata:  # see tools/stale.py
        metadata["ran_with"] = book.metadata["ran_with"]
    book.metadata = nbformat.from_dict(metadata)
    book.nbformat, book.nbformat_minor = 4, 5
    for number, cell in enumerate(book.cells):
        cell.id = f"cell-{number:02}"
        cell.metadata = {k: v for k, v in cell.metadata.items() if k == "tags"}
    return book


def write(book, path):
    """Write a notebook as the repository keeps it."""
    path.write_text(nbformat.writes(normalize(book), indent=1) + "\n")


def execute(path):
    """Run the notebook at `path` in its own folder and store it there.

    Raises CellExecutionError if a cell fails; the file is left as it was.
    """
    book = nbformat.read(path, as_version=4)
    client = NotebookClient(
        book,
        timeout=None,  # a command that does nothing is ended by harness/commands.py
        resources={"metadata": {"path": str(path.parent)}},
        record_timing=False,
        coalesce_streams=True,
    )
    client.execute()
    book.metadata["ran_with"] = stale.digest_of_notebook(path)
    write(book, path)


def show_again(path):
    """Run only those cells again, in this process, and store what they print.

    Pictures are drawn again, too, from what their outputs keep.
    """
    book = nbformat.read(path, as_version=4)
    for cell in book.cells:
        for output in cell.get("outputs", []):
            if picture.drawn_by(output):
                output.data["image/png"] = picture.drawn_now(output)
        if cell.cell_type == "code" and stale.only_shows(cell.source):
            text = io.StringIO()
            with contextlib.redirect_stdout(text):
                exec(cell.source, {"lesson": lesson})
            shown = nbformat.v4.new_output("stream", text=text.getvalue())
            cell.outputs = [shown] if shown.text else []
    write(book, path)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--show", action="store_true", help="only cells that show files, and pictures"
    )
    parser.add_argument("notebooks", nargs="*", type=Path)
    args = parser.parse_args()
    for path in args.notebooks:
        if path.suffix != ".ipynb" or not path.is_file():
            fail(f"there is no notebook {path}")
    for path in args.notebooks or notebooks():
        if args.show:
            show_again(path)
        else:
            print(path, flush=True)
            execute(path.resolve())


if __name__ == "__main__":
    main()
