"""From a configuration to training and validation sequences."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from .config import Config, ConfigError
from .corpus import Source
from .files import cache_folder
from .mixture import Mixture
from .store import TokenStore, cached_store
from .tokenizer import TextTokenizer, cached_tokenizer, load_tokenizer


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
    training = [store["training"] for store in stores]
    mixture = Mixture(
        training, [source.weight for source in settings.sources], config.run.seq_len, config.run.seed, settings.mode
    )
    for store in training:
        say(f"{store.name}: {store.documents:,} documents, {store.text_bytes:,} bytes, {len(store.tokens):,} tokens")
    order = (mixture.shares, config.run.seq_len, config.run.seed, settings.mode, settings.validation)
    content = [tokenizer.fingerprint(), *(source.fingerprint for source in sources)]
    fingerprint = hashlib.sha256(repr((order, content)).encode()).hexdigest()
    return Data(tokenizer, mixture, [store["validation"] for store in stores], fingerprint)
