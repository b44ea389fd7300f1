"""Files that are either whole or absent: write aside, flush to the disk, rename."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


def write_atomic(path: Path, content: bytes | str) -> None:
    """Write `content` so that `path` never holds a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, aside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(aside, 0o644)
        os.replace(aside, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(aside)
        raise
    sync_folder(path.parent)


@contextlib.contextmanager
def folder_atomic(path: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield a folder aside; on success it becomes `path` with everything in it on the disk, else it vanishes.

    Where `path` exists by then (another process made the same thing) it is kept and the work dropped, unless `replace`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    try:
        yield aside
        for entry in aside.iterdir():
            with entry.open("rb") as file:
                os.fsync(file.fileno())
        sync_folder(aside)
        aside.chmod(0o755)
        if replace:
            remove_folder(path)
        try:
            os.rename(aside, path)
        except OSError:
            if not path.is_dir():
                raise
        sync_folder(path.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def remove_folder(path: Path) -> None:
    """Delete a folder, if it is there, so that a kill halfway leaves nothing under its name."""
    aside = path.with_name(f".{path.name}.old")
    shutil.rmtree(aside, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        path.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)


def sync_folder(path: Path) -> None:
    """Make renames inside `path` survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def cache_folder(configured: str | None) -> Path:
    """Where tokenizers and token stores are kept: the configured folder, $EVENLOAD_CACHE, or ~/.cache/evenload."""
    chosen = configured or os.environ.get("EVENLOAD_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "evenload"
