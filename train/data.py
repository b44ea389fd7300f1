"""From a configuration to training and validation sequences."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from .config import Config
from .corpus import Source
from .errors import ConfigError
from .files import cache_folder, remove_stale
from .mixture import Mixture
from .store import TokenStore, cached_store
from .tokenizer import TextTokenizer, cached_tokenizer, load_tokenizer

A_DAY = 86400.0


@dataclass
class Data:
    """Everything that a run reads."""

    tokenizer: TextTokenizer
    mixture: Mixture
    validation: list[TokenStore]  # one per source
    fingerprint: str  # changes with the tokens or their order


def load_data(config: Config, say: Callable[[str], None] = print) -> Data:
    """Tokenizer, training mixture and validation stores; from the cache where it has them.

    Raises ConfigError for sources that cannot be read or are too small.
    """
    settings, cache = config.data, cache_folder(config.data.cache)
    remove_stale(cache, ".tok*", A_DAY)  # what a kill left of a tokenizer or of tokens; a younger one may be another run's
    sources = [Source(source, cache) for source in settings.sources]
    if settings.tokenizer:
        tokenizer = load_tokenizer(settings.tokenizer)
    else:
        size = config.model.vocab_size
        tokenizer, trained = cached_tokenizer(sources, size, settings.tokenizer_bytes, settings.validation, cache)
        if trained:
            say(f"trained a byte-level BPE tokenizer of {tokenizer.size:,} tokens")
    if tokenizer.size > config.model.vocab_size:
        raise ConfigError(f"model.vocab_size = {config.model.vocab_size}: the tokenizer has {tokenizer.size} tokens")
    stores = [cached_store(source, tokenizer, settings.validation, cache) for source in sources]
    for source in sources:
        if source.skipped:
            say(f"{source.name}: {source.skipped:,} rows without a text in {source.config.field!r} were left out")
    training = [store["training"] for store in stores]
    validation = [store["validation"] for store in stores]
    mixture = Mixture(
        training, [source.weight for source in settings.sources], config.run.seq_len, config.run.seed, settings.mode
    )
    for store in validation:
        if not store.sequences(config.run.seq_len):
            raise ConfigError(
                f"data.sources: {store.name}: {len(store.tokens)} validation tokens do not fill one sequence of "
                f"{config.run.seq_len}; raise data.validation, or shorten run.seq_len"
            )
    for store in training:
        say(f"{store.name}: {store.documents:,} documents, {store.text_bytes:,} bytes, {len(store.tokens):,} tokens")
    order = (mixture.shares, config.run.seq_len, config.run.seed, settings.mode, settings.validation)
    content = [tokenizer.fingerprint(), *(source.fingerprint for source in sources)]
    fingerprint = hashlib.sha256(repr((order, content)).encode()).hexdigest()
    return Data(tokenizer, mixture, validation, fingerprint)
