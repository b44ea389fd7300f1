"""Files that are either whole or absent: write aside, flush to the disk, rename."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

OLD, DROPPED = ".old", ".dropped"  # ends of the names under which a folder waits for its replacement, or its deletion


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

    Where `path` exists by then (another process made the same thing) it is kept and the work dropped, unless `replace`:
    then the old one steps aside first and is deleted last, and a kill in between is mended by `put_back_replaced`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    try:
        yield aside
        aside.chmod(0o755)
        publish_folder(aside, path, replace=replace)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def publish_folder(aside: Path, path: Path, *, replace: bool = False) -> None:
    """Rename `aside` to `path` once everything in it is on the disk; see `folder_atomic`."""
    for entry in aside.iterdir():
        with entry.open("rb") as file:
            os.fsync(file.fileno())
    sync_folder(aside)
    if replace:
        _step_aside(path, OLD)
    try:
        os.rename(aside, path)
    except OSError:
        if not path.is_dir():
            raise
    sync_folder(path.parent)
    if replace:
        shutil.rmtree(_aside(path, OLD), ignore_errors=True)


def remove_folder(path: Path) -> None:
    """Delete a folder, if it is there, so that a kill halfway leaves nothing under its name."""
    _step_aside(path, DROPPED)
    shutil.rmtree(_aside(path, DROPPED), ignore_errors=True)


def put_back_replaced(folder: Path) -> None:
    """Give the folders inside `folder` that a killed `folder_atomic(replace=True)` had moved aside their names again, where
    the new one did not arrive."""
    for aside in folder.glob(f".*{OLD}"):
        path = aside.with_name(aside.name.removeprefix(".").removesuffix(OLD))
        if not path.exists():
            os.rename(aside, path)


def remove_stale(folder: Path, pattern: str, seconds: float) -> None:
    """Delete what matches `pattern` inside `folder` and was last written to longer than `seconds` ago."""
    for path in folder.glob(pattern):
        with contextlib.suppress(FileNotFoundError):  # another process tidies up as well
            newest = max(part.stat().st_mtime for part in (path, *path.glob("*")))
            if newest < time.time() - seconds:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _aside(path: Path, mark: str) -> Path:
    return path.with_name(f".{path.name}{mark}")


def _step_aside(path: Path, mark: str) -> None:
    shutil.rmtree(_aside(path, mark), ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        os.rename(path, _aside(path, mark))


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
