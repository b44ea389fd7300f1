"""How far each expert is from taking each token, in float32 and as the bf16 numbers that the exact quantile ranks.

Shape suffixes: T tokens, E experts.
"""

import torch
from torch import Tensor

from .radix import canonical, high_byte_histogram


def margins(selection_TE: Tensor, cutoff_T: Tensor, allowed_TE: Tensor | None, mask_T: Tensor | None) -> Tensor:
    """(T, E) selection - cutoff; -inf where `allowed_TE` or `mask_T` is False, and where -inf meets a cutoff of -inf."""
    margins_TE = selection_TE - cutoff_T[:, None]
    if allowed_TE is not None:
        margins_TE = margins_TE.masked_fill(~allowed_TE, float("-inf"))
    if mask_T is not None:
        margins_TE = margins_TE.masked_fill(~mask_T[:, None], float("-inf"))
    # A -inf logit minus the -inf cutoff of a row without a runner-up is NaN.
    return margins_TE.nan_to_num(nan=float("-inf"), posinf=float("inf"), neginf=float("-inf"))


def bf16_margins(
    selection_TE: Tensor, cutoff_T: Tensor, allowed_TE: Tensor | None, mask_T: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The margins rounded once to (T, E) canonical bfloat16, and (E, 256) int32: how many keys have each high byte."""
    values_TE = canonical(margins(selection_TE, cutoff_T, allowed_TE, mask_T).to(torch.bfloat16))
    return values_TE, high_byte_histogram(values_TE)
