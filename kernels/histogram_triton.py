"""Histograms per expert in Triton: a program counts a block of columns in shared memory, and writes its counts once.

A tile holds BLOCK_T rows of BLOCK_E neighbouring columns, so that memory is read in whole sectors; its bins are numbered
column * B + bin. A program walks over many tiles and adds in registers. The partial tables are then summed: integers, so in
any order, and without a single global atomic.

Shape suffixes: T tokens, E experts (one column each), B bins, P programs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import on_device, pow2, programs

# tl.histogram gives every lane of a warp a register for each 32nd bin, so a program's table has at most 2048 bins.
BYTE_TILE = {"BLOCK_T": 256, "BLOCK_E": 8}
UNIFORM_BINS = 2048
UNIFORM_TILE = 2048  # elements
NUM_WARPS = 8


@triton.jit
def _key(bits):
    """The sortable 16-bit key of bfloat16 bits in 0..65535, as in radix.bf16_key. The bits are canonical: there is no -0.0."""
    return tl.where(bits >= 0x8000, 0xFFFF - bits, bits | 0x8000)


@triton.jit
def _bf16_bits(values):
    """Bits of float32 numbers rounded to bfloat16, to nearest, ties to even, with one zero. No NaN goes in."""
    bits = values.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 & 0xFFFF
    return tl.where(rounded == 0x8000, 0, rounded)


@triton.jit
def _store_partial(partial, counts, column_block, E, BLOCK_E: tl.constexpr, BP: tl.constexpr, B):
    """`counts` of this program into partial[program, column, bin]."""
    place = tl.arange(0, BLOCK_E * BP)
    column = column_block * BLOCK_E + place // BP
    bin_ = place % BP
    to = (tl.program_id(0).to(tl.int64) * E + column) * B + bin_
    tl.store(partial + to, counts, mask=(column < E) & (bin_ < B))


@triton.jit
def margin_bytes_kernel(
    selection,
    cutoff,
    allowed,
    mask,
    values,
    partial,
    num_tokens,
    E,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    LIMITED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """bf16 margins out, and the counts of their keys' high bytes, in one pass."""
    column = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    counts = tl.zeros([BLOCK_E * 256], tl.int32)
    for tile in range(tl.program_id(0), tl.cdiv(num_tokens, BLOCK_T), tl.num_programs(0)):
        row = tile * BLOCK_T + tl.arange(0, BLOCK_T)
        at = row.to(tl.int64)[:, None] * E + column[None, :]
        here = (row < num_tokens)[:, None] & (column < E)[None, :]
        margin = (
            tl.load(selection + at, mask=here, other=0.0) - tl.load(cutoff + row, mask=row < num_tokens, other=0.0)[:, None]
        )
        out = margin != margin  # a -inf logit minus the -inf cutoff of a row without a runner-up
        if LIMITED:
            out = out | (tl.load(allowed + at, mask=here, other=0) == 0)
        if MASKED:
            out = out | (tl.load(mask + row, mask=row < num_tokens, other=0) == 0)[:, None]
        bits = _bf16_bits(tl.where(out, float("-inf"), margin))
        tl.store(values + at, bits.to(tl.int16), mask=here)
        bins = tl.arange(0, BLOCK_E)[None, :] * 256 + (_key(bits) >> 8)
        counts += tl.histogram(tl.ravel(bins), BLOCK_E * 256, mask=tl.ravel(here))
    _store_partial(partial, counts, tl.program_id(1), E, BLOCK_E, 256, 256)


@triton.jit
def byte_histogram_kernel(
    values, high, partial, num_tokens, E, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, LOW: tl.constexpr
):
    """Counts of the keys' high bytes; with LOW, of the low bytes of those keys whose high byte is the column's `high`."""
    column = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    counts = tl.zeros([BLOCK_E * 256], tl.int32)
    if LOW:
        wanted = tl.load(high + column, mask=column < E, other=0).to(tl.int32)
    for tile in range(tl.program_id(0), tl.cdiv(num_tokens, BLOCK_T), tl.num_programs(0)):
        row = tile * BLOCK_T + tl.arange(0, BLOCK_T)
        here = (row < num_tokens)[:, None] & (column < E)[None, :]
        bits = tl.load(values + row.to(tl.int64)[:, None] * E + column[None, :], mask=here, other=0).to(tl.int32) & 0xFFFF
        key = _key(bits)
        byte = key >> 8
        if LOW:
            here = here & (byte == wanted[None, :])
            byte = key & 0xFF
        bins = tl.arange(0, BLOCK_E)[None, :] * 256 + byte
        counts += tl.histogram(tl.ravel(bins), BLOCK_E * 256, mask=tl.ravel(here))
    _store_partial(partial, counts, tl.program_id(1), E, BLOCK_E, 256, 256)


@triton.jit
def uniform_histogram_kernel(
    values,
    low,
    per_unit,
    mask,
    partial,
    num_tokens,
    E,
    B,
    BP: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Counts in B equal bins that begin at `low`, `per_unit` of them in a unit; what is outside goes to the outer bins."""
    column = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    counts = tl.zeros([BLOCK_E * BP], tl.int32)
    begin = tl.load(low)
    scale = tl.load(per_unit)
    for tile in range(tl.program_id(0), tl.cdiv(num_tokens, BLOCK_T), tl.num_programs(0)):
        row = tile * BLOCK_T + tl.arange(0, BLOCK_T)
        here = (row < num_tokens)[:, None] & (column < E)[None, :]
        value = tl.load(values + row.to(tl.int64)[:, None] * E + column[None, :], mask=here, other=0.0)
        if MASKED:
            here = here & (tl.load(mask + row, mask=row < num_tokens, other=0) != 0)[:, None]
        bin_ = tl.minimum(tl.maximum(tl.floor((value - begin) * scale), 0.0), B - 1.0).to(tl.int32)
        bins = tl.arange(0, BLOCK_E)[None, :] * BP + bin_
        counts += tl.histogram(tl.ravel(bins), BLOCK_E * BP, mask=tl.ravel(here))
    _store_partial(partial, counts, tl.program_id(1), E, BLOCK_E, BP, B)


def margin_bytes(
    selection_TE: Tensor, cutoff_T: Tensor, allowed_TE: Tensor | None, mask_T: Tensor | None
) -> tuple[Tensor, Tensor]:
    selection_TE = selection_TE.contiguous()
    num_tokens, num_columns = selection_TE.shape
    values_TE = torch.empty_like(selection_TE, dtype=torch.bfloat16)
    grid = _grid(num_tokens, num_columns, **BYTE_TILE, device=selection_TE.device)
    partial = selection_TE.new_empty((grid[0], num_columns, 256), dtype=torch.int32)
    with on_device(selection_TE):
        margin_bytes_kernel[grid](
            selection_TE,
            cutoff_T.contiguous(),
            selection_TE if allowed_TE is None else allowed_TE.contiguous().view(torch.uint8),
            selection_TE if mask_T is None else mask_T.contiguous().view(torch.uint8),
            values_TE.view(torch.int16),
            partial,
            num_tokens,
            num_columns,
            **BYTE_TILE,
            LIMITED=allowed_TE is not None,
            MASKED=mask_T is not None,
            num_warps=NUM_WARPS,
        )
    return values_TE, partial.sum(dim=0, dtype=torch.int32)


def byte_histogram(values_TE: Tensor, high_E: Tensor | None) -> Tensor:
    values_TE = values_TE.contiguous()
    num_tokens, num_columns = values_TE.shape
    grid = _grid(num_tokens, num_columns, **BYTE_TILE, device=values_TE.device)
    partial = values_TE.new_empty((grid[0], num_columns, 256), dtype=torch.int32)
    bits_TE = values_TE.view(torch.int16)
    with on_device(values_TE):
        byte_histogram_kernel[grid](
            bits_TE,
            bits_TE if high_E is None else high_E.contiguous(),
            partial,
            num_tokens,
            num_columns,
            **BYTE_TILE,
            LOW=high_E is not None,
            num_warps=NUM_WARPS,
        )
    return partial.sum(dim=0, dtype=torch.int32)


def uniform_histogram(values_TE: Tensor, low: Tensor, high: Tensor, num_bins: int, mask_T: Tensor | None) -> Tensor:
    values_TE = values_TE.contiguous()
    num_tokens, num_columns = values_TE.shape
    tile = uniform_tile(num_bins)
    grid = _grid(num_tokens, num_columns, tile["BLOCK_T"], tile["BLOCK_E"], values_TE.device)
    partial = values_TE.new_empty((grid[0], num_columns, num_bins), dtype=torch.int32)
    with on_device(values_TE):
        uniform_histogram_kernel[grid](
            values_TE,
            low.contiguous(),
            num_bins / (high - low),
            values_TE if mask_T is None else mask_T.contiguous().view(torch.uint8),
            partial,
            num_tokens,
            num_columns,
            num_bins,
            **tile,
            MASKED=mask_T is not None,
            num_warps=NUM_WARPS,
        )
    return partial.sum(dim=0, dtype=torch.int64)


def uniform_tile(num_bins: int) -> dict[str, int]:
    columns = max(1, min(8, UNIFORM_BINS // pow2(num_bins)))
    return {"BP": pow2(num_bins), "BLOCK_E": columns, "BLOCK_T": UNIFORM_TILE // columns}


def _grid(num_tokens: int, num_columns: int, BLOCK_T: int, BLOCK_E: int, device: torch.device) -> tuple[int, int]:
    column_blocks = triton.cdiv(num_columns, BLOCK_E)
    # Two programs a core keep memory busy; more would only write more tables.
    wanted = max(1, programs(10**9, device, per_core=2) // column_blocks)
    return min(max(1, triton.cdiv(num_tokens, BLOCK_T)), wanted), column_blocks
