"""Evaluation tasks of lm-eval made of the text that a run has held out, for machines that reach no hub.

For every source of the run's corpus: the bits per byte of its held-out documents, and a choice among four passages, of which
one is how a held-out document goes on. A task is a file of lm-eval's, the packaged tasks/*.yaml with a name and the data.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import json
import random
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from .config import Config
from .corpus import Source, held_out
from .files import cache_folder, write_atomic

MAX_DOCUMENTS = 10_000  # held-out documents that are looked at, per source
MAX_CHARACTERS = 400_000  # of documents that are scored, per source
CONTEXT, CONTINUATION = 256, 64  # characters; the latter at most
ITEMS = 400  # a standard error of at most 2.5 % in a share of right answers
CHOICES = 4
MIN_ITEMS = 20  # fewer say nothing
SEED = 0

KINDS = ("bits_per_byte", "continuation")


def task_names(config: Config) -> list[str]:
    """The tasks that a run's held-out text is made into, where there is enough of it."""
    return [f"{kind}_{source.name}" for source in config.data.sources for kind in KINDS]


def write_tasks(config: Config, names: Sequence[str], folder: Path, say: Callable[[str], None] = print) -> list[str]:
    """Write the tasks `names`, of `task_names`, into `folder` as lm-eval reads them (--include_path), and return those that
    have text enough. The same corpus and configuration give the same files.

    Raises ConfigError for a source that cannot be read.
    """
    cache = cache_folder(config.data.cache)
    made = []
    for settings in config.data.sources:
        wanted = [kind for kind in KINDS if f"{kind}_{settings.name}" in names]
        if not wanted:
            continue
        texts = sample(held_out_texts(Source(settings, cache), config.data.validation))
        for kind in wanted:
            name = f"{kind}_{settings.name}"
            rows = [{"text": text} for text in texts] if kind == "bits_per_byte" else continuations(texts)
            if len(rows) < (1 if kind == "bits_per_byte" else MIN_ITEMS):
                say(f"{name}: left out; {len(texts)} held-out documents of {settings.name} give {len(rows)} questions")
                continue
            _write(name, kind, rows, folder, cache)
            made.append(name)
    return made


def held_out_texts(source: Source, share: float) -> Iterator[str]:
    """The documents that training with data.validation = `share` never reads, in the source's order."""
    return (document.text for document in source.documents() if held_out(document.group, share))


def sample(texts: Iterable[str]) -> list[str]:
    """Documents of MAX_CHARACTERS together, or all where there are fewer: by the hash of their text, so that it does not matter
    which are neighbours."""
    chosen: list[str] = []
    characters = 0
    for text in sorted(set(islice(texts, MAX_DOCUMENTS)), key=lambda text: hashlib.sha256(text.encode()).digest()):
        if chosen and characters + len(text) > MAX_CHARACTERS:
            continue
        chosen.append(text)
        characters += len(text)
    return chosen


def continuations(texts: Sequence[str]) -> list[dict[str, Any]]:
    """{context, choices, answer} of up to ITEMS passages that do not overlap. Each passage is cut before white space, where no
    token of a byte-level vocabulary spans the cut; the wrong choices are how passages of other documents go on."""
    chooser = random.Random(SEED)
    passages = [(number, *passage) for number, text in enumerate(texts) for passage in _passages(text)]
    chooser.shuffle(passages)
    rows = []
    for number, context, right in passages:
        others = {passage: None for other, _, passage in chooser.sample(passages, min(len(passages), 40)) if other != number}
        others.pop(right, None)
        if len(others) < CHOICES - 1:
            continue
        choices = list(others)[: CHOICES - 1]
        answer = chooser.randrange(CHOICES)
        choices.insert(answer, right)
        rows.append({"context": context, "choices": choices, "answer": answer})
        if len(rows) == ITEMS:
            break
    return rows


def _passages(text: str) -> Iterator[tuple[str, str]]:
    """(context, how it goes on) of one passage after the other."""
    ends = [match.start() for match in re.finditer(r"(?<=\S)\s", text)]  # where a word has just ended
    start = 0
    while (at := bisect_left(ends, start + CONTEXT)) < len(ends):
        cut = ends[at]
        stop = ends[bisect_right(ends, cut + CONTINUATION) - 1]  # the cut itself where the next word is too long
        if stop - cut >= CONTINUATION // 2:
            yield text[start:cut], text[cut:stop]
        start = stop


def _write(name: str, kind: str, rows: list[dict[str, Any]], folder: Path, cache: Path) -> None:
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    # Its content is part of the name: the reader takes a file of the same name for the one that it has read before.
    data = folder / f"{name}-{hashlib.sha256(lines.encode()).hexdigest()[:12]}.jsonl"
    template = importlib.resources.files(__package__) / "tasks" / f"{kind}.yaml"
    task = {"task": name, **yaml.safe_load(template.read_text(encoding="utf-8"))}
    task["dataset_kwargs"] = {"data_files": {"test": str(data.resolve())}, "cache_dir": str(cache.resolve() / "datasets")}
    for older in folder.glob(f"{name}-*.jsonl"):
        if older != data:
            older.unlink()
    write_atomic(data, lines)
    write_atomic(folder / f"{name}.yaml", yaml.safe_dump(task, sort_keys=False))
