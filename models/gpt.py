"""A GPT-MoE decoder: pre-norm blocks of attention and experts, trained on a chunked cross-entropy.

Shape suffixes: B batch, S sequence, D model, V vocabulary, L MoE layers.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..balancers import Router, anchor_loss
from .attention import Attention, SequenceContext, continued_context, sequence_context
from .cache import KVCache
from .config import GPTConfig
from .experts import Experts
from .layers import DenseFFN, Linear, RMSNorm
from .loss import IGNORE, chunked_cross_entropy
from .moe import MoELayer
from .recompute import ACTIVATION_CHECKPOINTING, SELECTIVE_AND_COMPILED, cheaply_recomputed, recomputed


@dataclass
class GPTOutput:
    """What a forward pass returns.

    Attributes:
        loss: 0-dim, mean over targets of the cross-entropy with its z-loss; None without targets. 0 if there is no target.
        nll_sum: 0-dim without gradient, summed cross-entropy in nats, without z-loss; None without targets.
        num_targets: 0-dim int64; None without targets.
        logits: (B, S, V), or (N, V) of N selected positions; None with targets, for which they never exist all at once.
    """

    loss: Tensor | None = None
    nll_sum: Tensor | None = None
    num_targets: Tensor | None = None
    logits: Tensor | None = None


class Block(nn.Module):
    """x + attention(norm(x)), then x + ffn(norm(x)); the feed-forward is dense in the first `num_dense_layers` blocks.
    With `post_norm`, what comes out of either is normed too before it is added.

    forward(x (B, S, D), context) takes its arguments by position, so that reentrant activation checkpointing can wrap it.

    Attributes:
        activation_checkpointing: see `GPT.set_activation_checkpointing`.
        compiled: whether `compile_` was called.
    """

    activation_checkpointing = "none"
    compiled = False

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        stds = {"init_std": config.init_std, "out_std": config.init_std / math.sqrt(2 * config.num_layers)}
        self.attention_norm = RMSNorm(config.d_model, config.norm_eps)
        self.attention = Attention(
            config.d_model, config.num_heads, config.num_kv_heads, config.head_width, norm_eps=config.norm_eps, **stds
        )
        self.post_attention_norm = RMSNorm(config.d_model, config.norm_eps) if config.post_norm else None
        self.ffn_norm = RMSNorm(config.d_model, config.norm_eps)
        self.ffn: MoELayer | DenseFFN
        if layer < config.num_dense_layers:
            self.ffn = DenseFFN(config.d_model, config.dense_width, **stds)
        else:
            self.ffn = _moe_layer(config, stds)
        self.post_ffn_norm = RMSNorm(config.d_model, config.norm_eps) if config.post_norm else None

    def reset_parameters(self) -> None:
        norms = (self.attention_norm, self.post_attention_norm, self.ffn_norm, self.post_ffn_norm)
        for part in (self.attention, self.ffn, *(norm for norm in norms if norm is not None)):
            part.reset_parameters()

    def forward(self, x: Tensor, context: SequenceContext) -> Tensor:
        return recomputed(self._run, x, context) if self.activation_checkpointing == "full" else self._run(x, context)

    def compile_(self, **options: Any) -> None:
        """Compile what a forward runs. Checkpointing and sharding stay outside of the compiled code."""
        if not self.compiled:
            self._run = torch.compile(self._run, **options)  # type: ignore[method-assign]
            self.compiled = True

    def _run(self, x: Tensor, context: SequenceContext) -> Tensor:
        selective = self.activation_checkpointing == "selective"
        x = x + (cheaply_recomputed(self._attend, x, context) if selective else self._attend(x, context))
        hidden = self.ffn_norm(x)
        if isinstance(self.ffn, MoELayer):
            out = self.ffn(hidden, mask=context.mask, document_ids=context.document_ids)
        else:
            out = self.ffn(hidden)
        return x + (out if self.post_ffn_norm is None else self.post_ffn_norm(out))

    def _attend(self, x: Tensor, context: SequenceContext) -> Tensor:
        out = self.attention(self.attention_norm(x), context)
        return out if self.post_attention_norm is None else self.post_attention_norm(out)


def _moe_layer(config: GPTConfig, stds: dict[str, float]) -> MoELayer:
    router = Router(
        config.d_model,
        config.num_experts,
        config.top_k,
        balancers=config.balancers,
        score=cast(Any, config.score),  # the router checks it
        normalize=config.normalize_weights,
        scale=config.routed_scale,
        num_groups=config.num_groups,
        group_top_k=config.group_top_k,
        init_std=config.init_std,
        measure_residual=config.measure_residual,
    )
    experts = Experts(config.num_experts, config.d_model, config.expert_hidden, compute=config.expert_compute, **stds)
    shared = DenseFFN(config.d_model, config.shared_hidden, **stds) if config.shared_hidden else None
    return MoELayer(router, experts, shared, config.capacity_factor)


class GPT(nn.Module):
    """GPT-MoE decoder described by a `GPTConfig`.

    Can be built on the meta device: `to_empty` and `reset_parameters` then give, for the same seed, exactly the weights of
    a model built directly, buffers included.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        config.validate()
        self.config = config
        # Every part initialises itself when it is made, and reset_parameters goes through them in this same order.
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.d_model))
        self.reset_embedding()
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.final_norm = RMSNorm(config.d_model, config.norm_eps)
        self.head = None if config.tie_embeddings else Linear(config.d_model, config.vocab_size, config.init_std)

    def reset_parameters(self) -> None:
        """Initialise every parameter and buffer from torch's global generator."""
        self.reset_embedding()
        for block in self.blocks:
            cast(Block, block).reset_parameters()
        self.final_norm.reset_parameters()
        if self.head is not None:
            self.head.reset_parameters()

    def set_activation_checkpointing(self, mode: str) -> None:
        """What a training forward keeps for the backward, in every block.

        Args:
            mode: "none" = everything; "full" = each block's input, the rest is computed again, routing and communication
                too; "selective" = everything but what is cheap to compute again: norms, rotations, activation functions.
                Compiled blocks do that by themselves under "none", and hide what "selective" would have to see.
        """
        if mode not in ACTIVATION_CHECKPOINTING:
            raise ValueError(f"mode={mode!r}; choose one of {', '.join(map(repr, ACTIVATION_CHECKPOINTING))}")
        if mode == "selective" and any(cast(Block, block).compiled for block in self.blocks):
            raise ValueError(SELECTIVE_AND_COMPILED)
        for module in self.modules():
            if isinstance(module, Block | Experts | DenseFFN):
                module.activation_checkpointing = mode

    def compile_blocks(self, **options: Any) -> None:
        """torch.compile every block by itself, with torch.compile's `options`: equal blocks share their compiled code."""
        if any(cast(Block, block).activation_checkpointing == "selective" for block in self.blocks):
            raise ValueError(SELECTIVE_AND_COMPILED)
        for block in self.blocks:
            cast(Block, block).compile_(**options)

    def reset_embedding(self) -> None:
        nn.init.normal_(self.embedding, std=self.config.init_std)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        document_ids: Tensor | None = None,
        mask: Tensor | None = None,
        select: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> GPTOutput:
        """Loss with targets, logits without.

        Args:
            tokens: (B, S) integer ids below vocab_size.
            targets: (B, S) int64 ids, -100 = no loss here. Padding never counts.
            document_ids: (B, S) integer; attention stays within a contiguous run of equal ids.
            mask: (B, S) bool, True = real token.
            select: (B, S) bool, the positions whose logits are wanted, when not all are.
            cache: what these tokens continue, and what the next ones will; to decode with, in eval mode. A row is one
                document, with its padding, if any, on the left.

        The loss already carries `anchor_loss`: backward it as it is, or scaled, weighted, divided by the number of
        microbatches; the balancers' gradients follow.

        Raises:
            ValueError: if a shape or dtype does not fit, or S, with what the cache holds, exceeds max_seq_len.
        """
        self._check(tokens, targets=targets, document_ids=document_ids, mask=mask, select=select)
        x_BSD = F.embedding(tokens, self.embedding)
        shape = (self.config.head_width, self.config.rope_theta)
        if cache is None:
            context = sequence_context(x_BSD, *shape, mask=mask, document_ids=document_ids)
        else:
            self._check_cache(cache, tokens, document_ids)
            context = continued_context(x_BSD, *shape, cache, mask=mask)
        for layer, block in enumerate(self.blocks):
            if cache is not None:
                context = replace(context, cache=cache.layer(layer))
            x_BSD = block(x_BSD, context)
        x_BSD = self.final_norm(x_BSD)
        head_VD = self.embedding if self.head is None else self.head.weight
        if targets is None:
            return GPTOutput(logits=F.linear(x_BSD if select is None else x_BSD[select], head_VD))
        if mask is not None:
            targets = targets.masked_fill(~mask, IGNORE)
        loss_sum, nll_sum, num_targets = chunked_cross_entropy(
            x_BSD.flatten(0, 1), head_VD, targets.flatten(), z_loss=self.config.z_loss, chunk=self.config.loss_chunk
        )
        loss = anchor_loss(loss_sum / num_targets.clamp(min=1), self)
        return GPTOutput(loss=loss, nll_sum=nll_sum, num_targets=num_targets)

    def pop_dropped(self) -> Tensor:
        """(L,) int64: routed assignments that capacity dropped in training since the last call, per MoE layer, on this rank."""
        layers = [module for module in self.modules() if isinstance(module, MoELayer)]
        return torch.stack([layer.pop_dropped() for layer in layers]) if layers else torch.zeros(0, dtype=torch.int64)

    def _check(self, tokens: Tensor, **companions: Tensor | None) -> None:
        if tokens.dim() != 2 or tokens.is_floating_point():
            raise ValueError(
                f"tokens are {tokens.dtype} of shape {tuple(tokens.shape)}; give integer ids of shape (batch, sequence)"
            )
        if tokens.shape[1] > self.config.max_seq_len:
            raise ValueError(
                f"sequences of {tokens.shape[1]} tokens exceed max_seq_len={self.config.max_seq_len}; shorten them or raise it"
            )
        for name, value in companions.items():
            if value is None:
                continue
            if value.shape != tokens.shape:
                raise ValueError(f"{name} has shape {tuple(value.shape)}; it must be that of tokens, {tuple(tokens.shape)}")
            if name in ("mask", "select") and value.dtype != torch.bool:
                meaning = "real token" if name == "mask" else "logits wanted"
                raise ValueError(f"{name} has dtype {value.dtype}; give a bool tensor, True = {meaning}")

    def _check_cache(self, cache: KVCache, tokens: Tensor, document_ids: Tensor | None) -> None:
        end = cache.read + tokens.shape[1]
        limit = min(cache.length, self.config.max_seq_len)
        if end > limit:
            raise ValueError(
                f"{tokens.shape[1]} tokens after {cache.read} are more than the cache's length={cache.length} or "
                f"max_seq_len={self.config.max_seq_len} can hold"
            )
        if cache.real is not None and cache.real.shape[0] != tokens.shape[0]:
            raise ValueError(
                f"the cache has read {cache.real.shape[0]} rows, tokens have {tokens.shape[0]}; give the same ones"
            )
        if document_ids is not None or self.training:
            raise ValueError("a cache is to decode one document per row with, in eval mode; leave document_ids out")
