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


def high_byte_histogram(keys_TE: Tensor) -> Tensor:
    """(E, 256) int32: how many keys of each column have each high byte."""
    return _column_histogram(keys_TE >> 8, 256)


def low_byte_histogram(keys_TE: Tensor, high_E: Tensor) -> Tensor:
    """(E, 256) int32: low bytes of those keys of column e whose high byte is `high_E[e]`."""
    inside_TE = (keys_TE >> 8) == high_E
    # Keys outside the bin fall into a spare 257th bin, which is cut off.
    return _column_histogram(torch.where(inside_TE, keys_TE & 0xFF, 256), 257)[:, :256].contiguous()


def dense_histogram(keys_TE: Tensor) -> Tensor:
    """(E, 65536) int32: every key counted. 256 KiB per column, whatever T."""
    return _column_histogram(keys_TE, 65536)


def _column_histogram(bins_TE: Tensor, num_bins: int) -> Tensor:
    """(E, num_bins) int32 counts of int32 bins in [0, num_bins), column by column."""
    num_columns = bins_TE.shape[1]
    offsets_E = torch.arange(num_columns, dtype=torch.int32, device=bins_TE.device) * num_bins
    flat = (bins_TE + offsets_E).flatten()
    counts = torch.zeros(num_columns * num_bins, dtype=torch.int32, device=bins_TE.device)
    counts.index_add_(0, flat, torch.ones_like(flat))
    return counts.view(num_columns, num_bins)
