"""Executes notebooks from scratch and stores in them what they print and draw.

    python -P notebooks/execute.py                      # all of them, in place: `make notebooks`
    python -P notebooks/execute.py notebooks/04_phi.ipynb

A notebook runs in a kernel of this interpreter, in an empty folder, on one thread. What is stored depends on the cells and the
libraries alone: no times, no versions, no paths. With `small`, cells find EVENLOAD_NOTEBOOKS=small and do as little as shows
that they work.
"""

import argparse
import hashlib
import os
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbformat import NotebookNode

FOLDER = Path(__file__).parent
TIMEOUT = 600  # seconds for one cell


class ThisInterpreter(AsyncKernelManager):
    """Starts kernels of the running interpreter, whatever kernels are installed on the machine."""

    @property
    def kernel_spec(self) -> KernelSpec:
        kernel = [sys.executable, "-P", "-m", "ipykernel_launcher", "-f", "{connection_file}", "--HistoryManager.enabled=False"]
        return KernelSpec(argv=kernel, language="python", display_name="Python 3")


def execute(path: Path, *, small: bool, timeout: int = TIMEOUT) -> NotebookNode:
    """Run the notebook at `path` from its first cell to its last and return it with its outputs; the file stays as it is.

    Raises:
        nbclient.exceptions.CellExecutionError: at the first cell that fails, with its traceback.
        nbclient.exceptions.CellTimeoutError: at a cell that takes longer than `timeout` seconds.
    """
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "IPYTHONDIR": f"{folder}/ipython"}
        environment["EVENLOAD_NOTEBOOKS"] = "small" if small else "full"
        empty = Path(folder, "empty")
        empty.mkdir()
        client = NotebookClient(
            notebook,
            km=ThisInterpreter(connection_file=f"{folder}/kernel.json", transport="ipc"),
            timeout=timeout,
            record_timing=False,
            coalesce_streams=True,
            resources={"metadata": {"path": str(empty)}},
        )
        client.execute(env=environment)
    notebook.metadata = NotebookNode(
        kernelspec={"display_name": "Python 3", "language": "python", "name": "python3"},
        language_info={"name": "python"},
        evenload={"executed": fingerprint(notebook)},
    )
    return notebook


def fingerprint(notebook: NotebookNode) -> str:
    """Of the code: outputs that were stored with another one are stale."""
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return hashlib.sha256("\0".join(code).encode()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="*", type=Path, help="by default all in this folder")
    for path in parser.parse_args().notebooks or sorted(FOLDER.glob("*.ipynb")):
        began = time.monotonic()
        notebook = execute(path, small=False)
        nbformat.write(notebook, path)
        print(f"{path.name}: {time.monotonic() - began:.0f} s, {path.stat().st_size / 1000:.0f} kB", flush=True)


if __name__ == "__main__":
    main()
