"""Causal grouped-query attention with rotary positions and QK-norm, within documents.

Shape suffixes: B batch, S sequence, P sequence with what a cache holds before it, D model, H query heads, G key/value heads,
C head width, N real tokens of the batch.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .cache import KVCache, LayerCache
from .layers import Linear, RMSNorm


class PackedRows(NamedTuple):
    """Where documents lie once padding is taken out, as flash-attn's variable-length kernels want it."""

    tokens: Tensor  # (N,) int64, flat positions in the batch
    starts: Tensor  # (documents + 1,) int32
    max_len: int


# Not a NamedTuple: FSDP's mixed precision casts tensors in nested tuples, and rotary angles do not survive bfloat16.
@dataclass(frozen=True)
class SequenceContext:
    """What every block needs to know about the batch, made once per forward.

    Attributes:
        cos, sin: (S, C/2) float32, or (B, S, C/2) where rows have positions of their own.
        mask: (B, S) bool, True = real token, or None.
        document_ids: (B, S) integer, or None.
        allowed: (B, 1, S, S), or (B, 1, S, P) with a cache: bool, query may see key; None = plain causal.
        packed: set where flash-attn does the work.
        cache, read: keys and values of the `read` tokens before these; the layer's own, where there is a cache.
    """

    cos: Tensor
    sin: Tensor
    mask: Tensor | None = None
    document_ids: Tensor | None = None
    allowed: Tensor | None = None
    packed: PackedRows | None = None
    cache: LayerCache | None = None
    read: int = 0


def sequence_context(
    hidden: Tensor,
    head_width: int,
    rope_theta: float,
    *,
    mask: Tensor | None = None,
    document_ids: Tensor | None = None,
) -> SequenceContext:
    """Rotary angles and the attention pattern of a batch `hidden` (B, S, D).

    A document is a contiguous run of equal ids in a row. Tokens see earlier tokens of their document, and no padding.
    """
    batch, length = hidden.shape[:2]
    cos, sin = rotary_angles(length, head_width, rope_theta, hidden.device)
    if hidden.numel() == 0:
        return SequenceContext(cos, sin, mask, document_ids)
    documents = document_numbers(batch, length, document_ids, hidden.device)
    if flash_attention(_attention_dtype(hidden), hidden.device) is not None:
        return SequenceContext(cos, sin, mask, document_ids, packed=packed_rows(documents, mask))
    causal = (mask is None and document_ids is None) or _causality_suffices(documents, mask)
    return SequenceContext(cos, sin, mask, document_ids, None if causal else visible_keys(documents, mask))


def continued_context(
    hidden: Tensor, head_width: int, rope_theta: float, cache: KVCache, *, mask: Tensor | None = None
) -> SequenceContext:
    """The same for tokens `hidden` (B, S, D) that continue what `cache` has read; it counts them as read from here on.

    A row is one document, and padding may stand on either side of it: positions count a row's real tokens.
    """
    batch, length = hidden.shape[:2]
    read, end = cache.read, cache.read + length
    real = torch.ones(batch, length, dtype=torch.bool, device=hidden.device) if mask is None else mask
    real_BP = real if cache.real is None else torch.cat((cache.real, real), dim=1)
    positions_BS = (real_BP.cumsum(1) - 1).clamp(min=0)[:, read:]
    cos, sin = rotary_angles(end, head_width, rope_theta, hidden.device)
    allowed = visible_keys(torch.zeros_like(real_BP, dtype=torch.int64), real_BP)[:, :, read:]
    cache.real = real_BP
    return SequenceContext(cos[positions_BS], sin[positions_BS], mask, allowed=allowed, read=read)


def rotary_angles(length: int, head_width: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """(S, C/2) float32 cos and sin of position * theta^(-2i/C) (RoPE, arXiv 2104.09864); no buffer, so none to round."""
    frequencies = theta ** (-torch.arange(0, head_width, 2, device=device, dtype=torch.float32) / head_width)
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), frequencies)
    return angles.cos(), angles.sin()


def rotate(x_BSHC: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pair (i, i + C/2) of every head by its position's angle, in float32 at least."""
    first, second = x_BSHC.chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_BSHC.dtype)


def document_numbers(batch: int, length: int, document_ids: Tensor | None, device: torch.device) -> Tensor:
    """(B, S) int64 that grows by one at every document start, over the whole batch in row order."""
    starts = torch.zeros(batch, length, dtype=torch.bool, device=device)
    starts[:, :1] = True
    if document_ids is not None:
        starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return starts.flatten().cumsum(0).view(batch, length) - 1


def visible_keys(documents: Tensor, mask: Tensor | None) -> Tensor:
    """(B, 1, S, S) bool: same document, not later, not padding. A token always sees itself, so that no softmax is empty."""
    length = documents.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=documents.device).tril()
    allowed = causal & (documents[:, :, None] == documents[:, None, :])
    if mask is not None:
        allowed &= mask[:, None, :] | torch.eye(length, dtype=torch.bool, device=documents.device)
    return allowed[:, None]


def packed_rows(documents: Tensor, mask: Tensor | None) -> PackedRows:
    """The documents of a batch as one run of real tokens. Waits for the device once: how many there are depends on the data."""
    real = torch.ones_like(documents, dtype=torch.bool) if mask is None else mask
    tokens = real.flatten().nonzero()[:, 0]
    lengths = torch.unique_consecutive(documents.flatten()[tokens], return_counts=True)[1]
    starts = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return PackedRows(tokens, starts, documents.shape[1])


@cache
def _flash_varlen() -> Any:
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError:
        return None
    return flash_attn_varlen_func


def flash_attention(dtype: torch.dtype, device: torch.device) -> Any:
    """flash-attn's variable-length function where it is installed and can run, else None."""
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return None
    return _flash_varlen()


def _attention_dtype(hidden: Tensor) -> torch.dtype:
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


def _causality_suffices(documents: Tensor, mask: Tensor | None) -> bool:
    """Whether every row is one document with padding, if any, at its end: then is_causal says it all, and is faster.

    Looking at values would make a GPU wait and break a compiled graph; there, only absent values count as known.
    """
    if documents.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    one_document = bool((documents[:, 0] == documents[:, -1]).all())
    return one_document and (mask is None or bool((mask[:, 1:] <= mask[:, :-1]).all()))


class Attention(nn.Module):
    """(B, S, D) -> (B, S, D): grouped queries (arXiv 2305.13245), normed queries and keys (arXiv 2302.05442), rotary positions.

    Args:
        d_model, num_heads, num_kv_heads, head_width: D, H, G, C.
        norm_eps: of the query and key norms.
        init_std, out_std: standard deviations of the input and output projections (out_std None = init_std).
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        num_kv_heads: int,
        head_width: int,
        *,
        norm_eps: float = 1e-5,
        init_std: float = 0.02,
        out_std: float | None = None,
    ) -> None:
        super().__init__()
        self.heads = (num_heads, num_kv_heads, num_kv_heads)
        self.head_width = head_width
        self.qkv = Linear(d_model, sum(self.heads) * head_width, init_std)
        self.q_norm = RMSNorm(head_width, norm_eps)
        self.k_norm = RMSNorm(head_width, norm_eps)
        self.out = Linear(num_heads * head_width, d_model, init_std if out_std is None else out_std)

    def reset_parameters(self) -> None:
        for part in (self.qkv, self.q_norm, self.k_norm, self.out):
            part.reset_parameters()

    def forward(self, x: Tensor, context: SequenceContext) -> Tensor:
        q_BSHC, k_BSGC, v_BSGC = self.qkv(x).unflatten(-1, (-1, self.head_width)).split(self.heads, dim=2)
        q_BSHC = rotate(self.q_norm(q_BSHC), context.cos, context.sin)
        k_BSGC = rotate(self.k_norm(k_BSGC), context.cos, context.sin)
        if context.cache is not None:
            k_BSGC, v_BSGC = context.cache.extend(k_BSGC, v_BSGC, context.read)
        attend = _attend_sdpa if context.packed is None else _attend_flash
        return self.out(attend(q_BSHC, k_BSGC, v_BSGC, context).flatten(2))


def _attend_sdpa(q_BSHC: Tensor, k_BSGC: Tensor, v_BSGC: Tensor, context: SequenceContext) -> Tensor:
    if context.allowed is not None and q_BSHC.device.type == "cuda":
        # With a mask, only SDPA's slowest kernel, which keeps all S x S scores, groups queries by itself on a GPU.
        share = q_BSHC.shape[2] // k_BSGC.shape[2]
        k_BSGC, v_BSGC = k_BSGC.repeat_interleave(share, dim=2), v_BSGC.repeat_interleave(share, dim=2)
    out_BHSC = F.scaled_dot_product_attention(
        q_BSHC.transpose(1, 2),
        k_BSGC.transpose(1, 2),
        v_BSGC.transpose(1, 2),
        attn_mask=context.allowed,
        is_causal=context.allowed is None,
        enable_gqa=q_BSHC.shape[2] != k_BSGC.shape[2],
    )
    return out_BHSC.transpose(1, 2)


def _attend_flash(q_BSHC: Tensor, k_BSGC: Tensor, v_BSGC: Tensor, context: SequenceContext) -> Tensor:
    packed = context.packed
    function = flash_attention(q_BSHC.dtype, q_BSHC.device)
    if packed is None or function is None:
        raise ValueError(f"the context was made for flash-attn, which cannot run on {q_BSHC.dtype} on {q_BSHC.device}")
    if packed.tokens.numel() == 0:
        return q_BSHC * 0  # nothing but padding: zeros that stay in the graph
    q_NHC, k_NGC, v_NGC = (t.flatten(0, 1).index_select(0, packed.tokens) for t in (q_BSHC, k_BSGC, v_BSGC))
    out_NHC = function(q_NHC, k_NGC, v_NGC, packed.starts, packed.starts, packed.max_len, packed.max_len, causal=True)
    flat = q_BSHC.new_zeros(q_BSHC.flatten(0, 1).shape)
    return flat.index_copy(0, packed.tokens, out_NHC).view_as(q_BSHC)
