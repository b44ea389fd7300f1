"""Which document a token belongs to, in packed sequences.

Shape suffix: T tokens.
"""

import torch
from torch import Tensor


def document_numbers(document_ids: Tensor | None, mask: Tensor | None, x: Tensor) -> Tensor:
    """(T,) int64: which document each token belongs to, numbered from 0 in order; rows never share one.

    A document starts where a real token's id differs from that of the real token before it; padding starts none.
    """
    leading = x.shape[:-1]
    if document_ids is not None and document_ids.shape != leading:
        raise ValueError(f"document_ids have shape {tuple(document_ids.shape)}; the input's leading shape is {tuple(leading)}")
    starts = torch.atleast_1d(torch.zeros(leading, dtype=torch.bool, device=x.device))
    if document_ids is not None:
        ids = torch.atleast_1d(document_ids)
        real = torch.ones_like(starts) if mask is None else torch.atleast_1d(mask)
        place = torch.arange(ids.shape[-1], device=x.device).expand_as(ids)
        # Where the latest real token before each place is; -1 where there is none, and then nothing starts.
        before = torch.where(real, place, -1).cummax(dim=-1).values.roll(1, dims=-1)
        before[..., :1] = -1
        changed = ids != ids.gather(-1, before.clamp(min=0))
        starts = real & changed & (before >= 0)
    starts[..., :1] = True
    return starts.flatten().cumsum(dim=0) - 1
