"""Where text comes from: named sources of documents, each with a fingerprint of its content.

A source is read once, when its tokens are not in the cache yet; the fingerprint alone says whether they are.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import glob
import hashlib
import importlib
import inspect
import itertools
import os
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from .config import SourceConfig
from .errors import ConfigError, first_line

NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
MACHINE_FILES = ("_sysconfigdata", "sitecustomize", "usercustomize")  # differ between machines with the same Python
MIN_CHARACTERS = 200  # shorter modules are empty __init__ files
PROSE_FILES = (".txt", ".rst", ".html")
PROSE_NAMES = ("ChangeLog",)
READER = {"text": "text", "jsonl": "json", "parquet": "parquet"}  # our kinds -> builders of Hugging Face datasets


class Document(NamedTuple):
    """One document. Documents of a group always land in the same split, so that none leaks into validation."""

    text: str
    group: str


class Source:
    """Documents of one domain.

    Raises ConfigError, naming the source, when nothing can be read.
    """

    def __init__(self, config: SourceConfig, cache: Path) -> None:
        self.config = config
        self.cache = cache
        self._dataset: Any = None
        self.skipped = 0  # rows without text, at the latest reading

    @property
    def name(self) -> str:
        return self.config.name

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hexadecimal hash that changes whenever a document does."""
        config = self.config
        digest = hashlib.sha256(repr((config.kind, config.field, config.sample_by, config.limit)).encode())
        if config.kind == "stdlib":
            digest.update(config.path.encode())
            for path in [*_library_modules(), *_library_prose(), Path(_topics().__file__)]:
                _update_with_file(digest, path)
        elif config.kind == "hub":
            digest.update(self._load()._fingerprint.encode())
        else:
            for name in self._files():
                _update_with_file(digest, Path(name))
        return digest.hexdigest()

    def documents(self) -> Iterator[Document]:
        """Every document in a fixed order; empty ones are dropped."""
        made = stdlib_documents(self.config.path) if self.config.kind == "stdlib" else self._documents_of_dataset()
        kept = (document for document in made if document.text.strip())
        return itertools.islice(kept, self.config.limit)

    def _documents_of_dataset(self) -> Iterator[Document]:
        dataset = self._load()
        if self.config.field not in dataset.column_names:
            raise ConfigError(
                f"data.sources: {self.name}: no column {self.config.field!r}; columns: {', '.join(dataset.column_names)}"
            )
        self.skipped = 0
        for row in dataset:
            text = row[self.config.field]
            if isinstance(text, str):
                yield Document(text, text)
            else:
                self.skipped += 1

    def _files(self) -> list[str]:
        path = os.path.expanduser(self.config.path)
        if Path(path).is_file():  # also where its name has the letters of a pattern
            return [path]
        files = sorted(name for name in glob.glob(path, recursive=True) if Path(name).is_file())
        if not files:
            raise ConfigError(f"data.sources: {self.name}: no file matches {self.config.path!r}")
        return files

    def _load(self) -> Any:
        if self._dataset is not None:
            return self._dataset
        import datasets

        config = self.config
        try:
            if config.kind == "hub":
                self._dataset = datasets.load_dataset(config.path, config.subset, split=config.split)
            else:
                options = {"sample_by": config.sample_by} if config.kind == "text" else {}
                with _without_bars(datasets):  # reading local files is over before a bar could help
                    self._dataset = datasets.load_dataset(
                        READER[config.kind],
                        data_files=[glob.escape(name) for name in self._files()],
                        split="train",
                        # Its own key is made of names and times: it would take a changed file for the old one.
                        cache_dir=str(self.cache / "datasets" / self.fingerprint),
                        **options,
                    )
        except ConfigError:
            raise
        except Exception as error:  # the readers raise whatever their formats raise
            reason = first_line(error.__cause__ or error)
            raise ConfigError(f"data.sources: {self.name}: cannot read {config.path!r}: {reason}") from error
        return self._dataset


@contextlib.contextmanager
def _without_bars(datasets: Any) -> Iterator[None]:
    shown = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()


def held_out(group: str, share: float) -> bool:
    """Whether a group of documents belongs to the validation split: a function of its name alone."""
    return int.from_bytes(hashlib.sha256(group.encode()).digest()[:8], "big") < share * 2**64


def stdlib_documents(part: str) -> Iterator[Document]:
    """The interpreter's own text. ``code``: the library's modules without tests; ``prose``: the language reference that
    ``help()`` shows, the modules' docstrings, and the text files that come along.

    A module and its docstrings form one group: a docstring in training never shows up inside validation code.
    """
    root = _library_root()
    if part == "code":
        for path in _library_modules():
            if len(text := _read_module(path)) >= MIN_CHARACTERS:
                yield Document(text, path.relative_to(root).as_posix())
        return
    for name, text in sorted(_topics().topics.items()):
        yield Document(text, f"topic {name}")
    for path in _library_modules():
        text = "\n\n".join(_docstrings(_read_module(path)))
        if len(text) >= MIN_CHARACTERS:
            yield Document(text, path.relative_to(root).as_posix())
    for path in _library_prose():
        yield Document(path.read_text(encoding="utf-8", errors="replace"), path.relative_to(root).as_posix())


def _docstrings(code: str) -> Iterator[str]:
    try:
        tree = ast.parse(code)
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False)
            if text:
                yield inspect.cleandoc(text)


def _topics() -> Any:
    return importlib.import_module("pydoc_data.topics")


def _library_root() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


@functools.cache
def _library_files() -> tuple[Path, ...]:
    """Every file of the standard library, sorted, without tests and installed packages."""
    found = []
    for folder, inside, files in os.walk(_library_root()):
        inside[:] = [name for name in inside if name not in NOT_LIBRARY]
        found += [Path(folder, name) for name in files if not name.startswith(MACHINE_FILES)]
    return tuple(sorted(found))


def _library_modules() -> list[Path]:
    return [path for path in _library_files() if path.suffix == ".py" and path.parent.name != "pydoc_data"]


def _library_prose() -> list[Path]:
    return [path for path in _library_files() if path.suffix in PROSE_FILES or path.name in PROSE_NAMES]


def _read_module(path: Path) -> str:
    try:
        with tokenize.open(path) as file:  # honours the module's declared encoding
            return file.read()
    except (SyntaxError, UnicodeDecodeError):
        return ""


def _update_with_file(digest: Any, path: Path) -> None:
    with path.open("rb") as file:
        digest.update(hashlib.file_digest(file, "sha256").digest())
