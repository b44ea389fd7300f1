"""BF16 numbers as sortable 16-bit keys, and the histograms of a two-pass radix selection.

bf16 has 65,536 bit patterns. `bf16_key` maps them to integers in the order of the numbers (-0.0 and 0.0 share a key), so
an order statistic of bf16 numbers is found exactly by counting: first the high byte, then the low byte inside one bin.
Source: EQB, arXiv 2609.28053; radix selection is textbook.

Shape suffixes: T tokens, E experts (one column each).
"""

import torch
from torch import Tensor


def bf16_key(values: Tensor) -> Tensor:
    """int32 keys in [0, 65535] with key(a) < key(b) exactly when a < b. `values`: bfloat16 without NaN, any shape."""
    bits = values.view(torch.int16).to(torch.int32) & 0xFFFF
    bits = bits.masked_fill(values == 0, 0)
    return torch.where(bits >= 0x8000, 0xFFFF - bits, bits | 0x8000)


def bf16_unkey(keys: Tensor) -> Tensor:
    """The bfloat16 numbers whose keys these are: the inverse of `bf16_key` (the key of both zeros gives 0.0)."""
    bits = torch.where(keys >= 0x8000, keys - 0x8000, 0xFFFF - keys)
    signed = torch.where(bits >= 0x8000, bits - 0x10000, bits)  # int16 holds -32768..32767
    return signed.to(torch.int16).view(torch.bfloat16)


def canonical(values: Tensor) -> Tensor:
    """The same bfloat16 numbers with every -0.0 as 0.0, so that equal numbers have equal bits; the histograms need that."""
    bits = values.view(torch.int16)
    return bits.masked_fill(bits == -32768, 0).view(torch.bfloat16)


def high_byte_histogram(values_TE: Tensor) -> Tensor:
    """(E, 256) int32: how many keys of each column have each high byte. `values_TE`: canonical bfloat16 without NaN."""
    return _in_key_order(_count(values_TE.view(torch.int16) >> 8, low=-128, num_bins=256))


def low_byte_histogram(values_TE: Tensor, high_E: Tensor) -> Tensor:
    """(E, 256) int32: low bytes of those keys of column e whose high byte is `high_E[e]`. `values_TE` as above."""
    negative_E = high_E < 128
    first_E = (torch.where(negative_E, -1 - high_E, high_E - 128) << 8).to(torch.int16)
    # int16 differences wrap, so exactly the values of the bin are 0..255 past its first; all others go to two bins beside
    # it, which is cheaper than picking them out.
    past_TE = (values_TE.view(torch.int16) - first_E).clamp_(-1, 256)
    counts_EB = _count(past_TE, low=-1, num_bins=258)[:, 1:-1]
    return torch.where(negative_E[:, None], counts_EB.flip(1), counts_EB)


def dense_histogram(values_TE: Tensor) -> Tensor:
    """(E, 65536) int32: every key counted. 256 KiB per column, whatever T. `values_TE` as above."""
    return _in_key_order(_count(values_TE.view(torch.int16), low=-32768, num_bins=65536))


def _count(codes_TE: Tensor, low: int, num_bins: int) -> Tensor:
    """(E, num_bins) counts of small integers in [low, low + num_bins), column by column."""
    num_columns = codes_TE.shape[1]
    offsets_E = torch.arange(num_columns, dtype=torch.int32, device=codes_TE.device) * num_bins - low
    return _bincount(torch.add(offsets_E, codes_TE), num_columns * num_bins).view(num_columns, num_bins)


def _in_key_order(counts_EB: Tensor) -> Tensor:
    """Signed integers put the negative numbers first but in the wrong order, -0.0 before -1.0: turn that half round."""
    negative_EB, positive_EB = counts_EB.tensor_split(2, dim=1)
    return torch.cat([negative_EB.flip(1), positive_EB], dim=1)


def _bincount(bins: Tensor, num_bins: int) -> Tensor:
    counts = torch.zeros(num_bins, dtype=torch.int32, device=bins.device)
    flat = bins.flatten()
    return counts.index_add_(0, flat, counts.new_ones(1).expand_as(flat))
