"""One run per run folder."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from .errors import ConfigError

LOCK = ".lock"


@contextlib.contextmanager
def only_run(folder: Path) -> Iterator[None]:
    """Context that one process at a time can be in; ends with the process, however that ends.

    Raises ConfigError when another one is. Platforms and file systems without locks let everybody in.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    with (folder / LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"another evenload is running in {folder}; wait for it, stop it, or choose another run.out"
            ) from error
        except OSError:  # a file system that has no locks
            pass
        yield
