"""Parameters and arithmetic of a model, read off its modules on the meta device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import cast

import torch
from torch import nn

from ..models import GPT, Block, GPTConfig, MoELayer


@dataclass(frozen=True)
class Size:
    """Parameters by part of the model, and FLOPs per token.

    Attributes:
        total, active: {part: parameters}. Active are those that one token is multiplied with: top_k of the experts, and not
            the embedding table unless it is the output head.
        weight_flops: forward and backward of the matrix products with weights: 6 per active matrix parameter (2 forward, 4
            backward; Kaplan et al., arXiv 2001.08361, section 2.1).
        attention_flops: those of the scores and their application: half of PaLM's 12 * layers * heads * head width * sequence
            (arXiv 2204.02311, appendix B), since a causal query sees half of the keys on average.
    """

    total: dict[str, int]
    active: dict[str, int]
    weight_flops: int
    attention_flops: int

    @property
    def flops(self) -> int:
        """Model FLOPs per token, forward and backward; recomputation under activation checkpointing is not counted."""
        return self.weight_flops + self.attention_flops


def measure_size(config: GPTConfig, seq_len: int) -> Size:
    """The size of the model that `config` describes, trained on sequences of `seq_len` tokens."""
    with torch.device("meta"):
        model = GPT(config)
    total, active = Counter[str](), Counter[str]()
    weight_flops = 0
    for part, parameter in _parts(model):
        used = Fraction(config.top_k, config.num_experts) if part == "experts" else Fraction(1)
        if parameter is model.embedding and model.head is not None:
            used = Fraction(0)
        total[part] += parameter.numel()
        active[part] += int(parameter.numel() * used)
        if parameter.ndim >= 2:
            weight_flops += 6 * int(parameter.numel() * used)
    attention_flops = 6 * config.num_layers * config.num_heads * config.head_width * seq_len
    return Size(dict(total), dict(active), weight_flops, attention_flops)


def _parts(model: GPT) -> Iterator[tuple[str, nn.Parameter]]:
    """(part, parameter) for each parameter of the model."""
    yield "embeddings", model.embedding
    if model.head is not None:
        yield "embeddings", cast(nn.Parameter, model.head.weight)
    for block in cast(Iterable[Block], model.blocks):
        norms: list[nn.Module | None] = [block.attention_norm, block.post_attention_norm, block.ffn_norm, block.post_ffn_norm]
        modules: dict[str, list[nn.Module | None]] = {"attention": [block.attention], "norms": norms}
        if isinstance(block.ffn, MoELayer):
            modules |= {"router": [block.ffn.router], "experts": [block.ffn.experts], "shared expert": [block.ffn.shared]}
        else:
            modules |= {"dense feed-forward": [block.ffn]}
        for part, found in modules.items():
            for module in found:
                for parameter in module.parameters() if module is not None else ():
                    yield part, parameter
    yield "norms", model.final_norm.weight
