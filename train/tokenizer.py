"""Byte-level BPE: trained once per corpus and vocabulary size, then read from the cache."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from .corpus import Source, held_out
from .errors import ConfigError, first_line
from .files import write_atomic

END_OF_TEXT = "<|endoftext|>"
FORMAT = 1  # part of every cache key: raise it when what is trained or stored changes


class TextTokenizer:
    """A byte-level BPE tokenizer and the facts that training needs of it.

    Raises ConfigError when the tokenizer is not byte-level or lacks the end-of-text token.
    """

    def __init__(self, tokenizer: Tokenizer, origin: str) -> None:
        self.tokenizer = tokenizer
        tokenizer.encode_special_tokens = True  # a text that spells a special token is text
        tokenizer.no_truncation()  # a file may carry either, and documents are encoded whole
        tokenizer.no_padding()
        end = tokenizer.token_to_id(END_OF_TEXT)
        if end is None:
            raise ConfigError(f"{origin}: the tokenizer has no {END_OF_TEXT} token")
        self.end_of_text: int = end
        special = {id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        alphabet = set(pre_tokenizers.ByteLevel.alphabet())
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self.size = max(vocabulary.values()) + 1
        if why := _not_byte_level(tokenizer, alphabet - vocabulary.keys()):
            raise ConfigError(f"{origin}: the tokenizer is not byte-level: {why}; train it as byte-level BPE")
        #: (vocabulary,) bytes of text that each token stands for; 0 for special tokens
        self.bytes_per_token = np.zeros(self.size, dtype=np.int64)
        for token, id in vocabulary.items():
            if id in special:
                continue
            if not alphabet.issuperset(token):
                raise ConfigError(f"{origin}: token {token!r} is not byte-level; train the tokenizer as byte-level BPE")
            self.bytes_per_token[id] = len(token)  # one character of the byte-level alphabet is one byte

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, without special tokens."""
        return [encoding.ids for encoding in self.tokenizer.encode_batch(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)

    def to_json(self) -> str:
        return self.tokenizer.to_str()

    def fingerprint(self) -> str:
        return hashlib.sha256(self.to_json().encode()).hexdigest()


def _not_byte_level(tokenizer: Tokenizer, missing: set[str]) -> str | None:
    """What keeps a token's characters from being the bytes of the text it stands for, if anything does."""
    if missing:
        return f"{len(missing)} of the 256 bytes have no token"
    steps = json.loads(tokenizer.to_str())
    if steps["normalizer"] is not None:
        return "a normalizer changes the text"
    splitter = steps["pre_tokenizer"] or {}
    if not any(part.get("type") == "ByteLevel" for part in (splitter, *splitter.get("pretokenizers", ()))):
        return "it has no ByteLevel pre-tokenizer"
    return None


def load_tokenizer(path: str) -> TextTokenizer:
    """Read a tokenizer.json; ConfigError when it is not one."""
    path = str(Path(path).expanduser())
    try:
        return TextTokenizer(Tokenizer.from_file(path), path)
    except ConfigError:
        raise
    except Exception as error:  # the reader raises plain Exception
        raise ConfigError(f"data.tokenizer: cannot read {path!r}: {first_line(error)}") from error


def cached_tokenizer(
    sources: Sequence[Source], vocab_size: int, budget: int, validation: float, cache: Path
) -> tuple[TextTokenizer, bool]:
    """(tokenizer, whether it was trained just now), trained on the training split of `sources`.

    `budget` is the number of characters to learn from, shared equally by the sources.
    """
    facts = (FORMAT, vocab_size, budget, validation, [source.fingerprint for source in sources])
    path = cache / f"tokenizer-{hashlib.sha256(repr(facts).encode()).hexdigest()[:24]}.json"
    if path.is_file():
        return load_tokenizer(str(path)), False
    texts = (text for source in sources for text in _training_texts(source, budget // len(sources), validation))
    tokenizer = train_tokenizer(texts, vocab_size)
    write_atomic(path, tokenizer.to_json())
    return tokenizer, True


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> TextTokenizer:
    """Learn a byte-level BPE vocabulary; id 0 is the end of text. Small corpora may give fewer than `vocab_size` tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return TextTokenizer(tokenizer, "trained tokenizer")


def _training_texts(source: Source, budget: int, validation: float) -> Iterator[str]:
    for document in source.documents():
        if held_out(document.group, validation):
            continue
        yield document.text[:budget]
        budget -= len(document.text)
        if budget <= 0:
            return
