"""The process of one run of a comparison: `evenload train`, which saves and stops when the comparison is gone."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

from ..errors import ConfigError
from ..lock import only_run

PATIENCE = 120.0  # seconds that the process before may need to save and leave the folder


def main() -> int:
    """`python -m evenload.train.compare.worker CONFIG.yaml`, with a pipe from the comparison as standard input."""
    from ..cli import main as command_line

    config = Path(sys.argv[1])
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    _wait_until_free(config.parent)
    return command_line(["train", str(config)])


def _stop_with_parent() -> None:
    """The pipe ends when the comparison does, even where it was killed: then save and stop, as at a SIGTERM."""
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGTERM)


def _wait_until_free(folder: Path) -> None:
    """Return when no process holds the run's folder: one whose comparison was killed may still be saving."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        try:
            with only_run(folder):
                return
        except ConfigError:
            time.sleep(0.5)


if __name__ == "__main__":
    sys.exit(main())
