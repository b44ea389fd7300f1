"""Validation: bits per byte of held-out text, per domain."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ..balancers import Routing, routers
from ..models.loss import IGNORE
from .store import TokenStore
from .tokenizer import TextTokenizer
from .world import World


@dataclass(frozen=True)
class Score:
    """How well a domain's held-out text was predicted."""

    bits_per_byte: float  # bits to encode the text, and where its documents end, per byte of UTF-8
    loss: float  # nats per token
    tokens: int
    text_bytes: int
    load: NDArray[np.int64] = field(repr=False, compare=False)  # (L, E) tokens per layer and expert


@torch.no_grad()
def evaluate(
    model: nn.Module,
    stores: Sequence[TokenStore],
    tokenizer: TextTokenizer,
    *,
    seq_len: int,
    max_tokens: int,
    batch_size: int,
    autocast: torch.dtype | None = None,
    stop: Callable[[], bool] = lambda: False,
    world: World = World(),  # noqa: B008  (frozen)
) -> dict[str, Score]:
    """{domain: Score} over at most `max_tokens` tokens of each store, spread evenly over it. Ranks share the sequences, and all
    have the scores.

    Runs in eval mode, in which routers observe nothing; the model's mode is put back. Text shorter than a sequence is
    cut off at the end of a store: a store must hold at least one sequence, else its domain is left out. `stop` is asked
    before every batch, on all ranks, which must say the same; once it says yes, only the domains that are done are returned.
    """
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    try:
        scores = {}
        for store in stores:
            available = store.sequences(seq_len)
            wanted = min(available, max(1, max_tokens // seq_len))
            if wanted:
                indices = np.arange(wanted) * available // wanted
                score = _score(model, store, tokenizer, indices, seq_len, batch_size, device, autocast, stop, world)
                if score is None:
                    break
                scores[store.name] = score
        return scores
    finally:
        model.train(was_training)


def _score(
    model: nn.Module,
    store: TokenStore,
    tokenizer: TextTokenizer,
    indices: np.ndarray,
    seq_len: int,
    batch_size: int,
    device: torch.device,
    autocast: torch.dtype | None,
    stop: Callable[[], bool],
    world: World,
) -> Score | None:
    nats, count, text_bytes = 0.0, 0, 0
    own = indices[world.rank :: world.size]
    # Every rank runs as many forwards as the one with most sequences: a sharded model takes all ranks for each.
    with watched_load(model) as load:
        for first in range(0, -(-len(indices) // world.size), batch_size):
            if stop():
                return None
            here = own[first : first + batch_size]
            mask = None
            if len(here) == 0:
                here, mask = indices[:1], torch.zeros(1, seq_len, dtype=torch.bool, device=device)
            tokens, targets, ids = store.read(here, seq_len)
            if mask is not None:
                targets.fill_(IGNORE)
            context = torch.autocast(device.type, dtype=autocast) if autocast else contextlib.nullcontext()
            with context:
                output = model(tokens.to(device), targets.to(device), document_ids=ids.to(device), mask=mask)
            nats += float(output.nll_sum)
            real = targets[targets != IGNORE].numpy()
            count += len(real)
            text_bytes += int(tokenizer.bytes_per_token[real].sum())
    layers = world.sum(torch.stack(load)).cpu().numpy()
    nats, count, text_bytes = world.sum(torch.tensor([nats, count, text_bytes], dtype=torch.float64)).tolist()
    return Score(nats / math.log(2) / max(1, text_bytes), nats / max(1, count), int(count), int(text_bytes), layers)


@contextlib.contextmanager
def watched_load(model: nn.Module) -> Iterator[list[torch.Tensor]]:
    """Yield (E,) counts per layer that grow with every routing decision made inside."""
    found = list(routers(model).values())
    load = [torch.zeros_like(router.counts) for router in found]

    def add(layer: int, routing: Routing) -> None:
        load[layer] += routing.counts

    hooks = [router.register_forward_hook(lambda _, __, out, layer=i: add(layer, out)) for i, router in enumerate(found)]
    try:
        yield load
    finally:
        for hook in hooks:
            hook.remove()
