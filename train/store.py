"""Tokenised documents on disk: one flat memory-mapped array per domain and split, written once.

Every document is laid down as ``<end> tokens <end>``: the first token is predicted from the mark before it, and where
the document ends is predicted too. No target ever crosses from one document into the next.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..models.loss import IGNORE
from .corpus import Document, Source, held_out
from .errors import ConfigError
from .files import folder_atomic
from .tokenizer import FORMAT, TextTokenizer

SPLITS = ("training", "validation")
BATCH = 256  # documents per call of the tokenizer


class TokenStore:
    """The tokens of one domain and split.

    `tokens` (N,) uint16 or uint32; `starts` (documents + 1,) int64, where each document begins, and N at the end.
    """

    def __init__(self, name: str, tokens: NDArray[Any], starts: NDArray[np.int64], text_bytes: int) -> None:
        self.name = name
        self.tokens = tokens
        self.starts = starts
        self.text_bytes = text_bytes

    @property
    def documents(self) -> int:
        return len(self.starts) - 1

    def sequences(self, seq_len: int) -> int:
        """How many sequences of `seq_len` tokens, each with a next token for every position."""
        return max(0, (len(self.tokens) - 1) // seq_len)

    def read(self, indices: NDArray[np.int64], seq_len: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Sequences by index: tokens, targets (IGNORE where the next token is another document's) and document ids
        counted from 0 within each sequence; each (B, seq_len) int64."""
        at = indices[:, None] * seq_len + np.arange(seq_len + 1)
        window = self.tokens[at].astype(np.int64)
        document = np.searchsorted(self.starts, at, side="right") - 1
        tokens, targets = window[:, :-1], window[:, 1:].copy()
        targets[document[:, 1:] != document[:, :-1]] = IGNORE
        ids = document[:, :-1] - document[:, :1]
        return torch.from_numpy(tokens.copy()), torch.from_numpy(targets), torch.from_numpy(ids)


def cached_store(source: Source, tokenizer: TextTokenizer, validation: float, cache: Path) -> dict[str, TokenStore]:
    """{split: store} of a source, tokenised at the first call for this content and tokenizer.

    Raises ConfigError when a split would hold no document.
    """
    facts = (FORMAT, source.fingerprint, tokenizer.fingerprint(), validation)
    folder = cache / f"tokens-{hashlib.sha256(repr(facts).encode()).hexdigest()[:24]}"
    if not folder.is_dir():
        with folder_atomic(folder) as aside:
            _tokenise(source, tokenizer, validation, aside)
    return {split: _open(source.name, folder, split) for split in SPLITS}


def _tokenise(source: Source, tokenizer: TextTokenizer, validation: float, folder: Path) -> None:
    dtype = np.uint16 if tokenizer.size <= 2**16 else np.uint32
    files = {split: (folder / f"{split}.bin").open("wb") for split in SPLITS}
    lengths: dict[str, list[int]] = {split: [] for split in SPLITS}
    text_bytes = dict.fromkeys(SPLITS, 0)
    end = [tokenizer.end_of_text]
    try:
        for batch in _batches(source.documents(), BATCH):
            for document, ids in zip(batch, tokenizer.encode([document.text for document in batch]), strict=True):
                split = SPLITS[held_out(document.group, validation)]
                np.array(end + ids + end, dtype=dtype).tofile(files[split])
                lengths[split].append(len(ids) + 2)
                text_bytes[split] += len(document.text.encode())
    finally:
        for file in files.values():
            file.close()
    for split in SPLITS:
        if not lengths[split]:
            total = sum(map(len, lengths.values()))
            raise ConfigError(
                f"data.sources: {source.name}: none of its {total} documents fell into the {split} split; "
                "use more documents (sample_by: paragraph) or another data.validation"
            )
        np.save(folder / f"{split}.starts.npy", np.concatenate([[0], np.cumsum(lengths[split])]).astype(np.int64))
    meta = {"dtype": np.dtype(dtype).name, "text_bytes": text_bytes}
    (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")


def _open(name: str, folder: Path, split: str) -> TokenStore:
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    tokens = np.memmap(folder / f"{split}.bin", dtype=meta["dtype"], mode="r")
    return TokenStore(name, tokens, np.load(folder / f"{split}.starts.npy"), meta["text_bytes"][split])


def _batches(documents: Iterator[Document], size: int) -> Iterator[list[Document]]:
    while batch := list(itertools.islice(documents, size)):
        yield batch
