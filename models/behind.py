"""A router behind somebody else's gate: it takes the gate's logits, and chooses anew where its balancers have a say.

What `models.hf` and `models.bridges` put into models that are not ours.

Shape suffixes: B batch, S sequence, T = B * S tokens, E experts, K top-k.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..balancers import Router, Routing

ROUTER = "evenload"  # the child of a gate that holds its router, and so a part of every key of ours in a state dict


class Batch(NamedTuple):
    """What a gate is not told: the shape of the batch whose tokens it gets, which are real, and where documents start."""

    shape: torch.Size  # (B, S)
    mask: Tensor | None = None  # (B, S) bool, True = real token
    document_ids: Tensor | None = None  # (B, S) int64


class GateRouter(Router):
    """A router without a gate of its own. `batch` is set before each forward of the gate and used up by it."""

    batch: Batch | None = None

    def choose(self, logits: Tensor, indices: Tensor) -> Routing | None:
        """The routing in place of the gate's own, or None where that stands.

        Args:
            logits: (T, E) raw logits of the gate.
            indices: (T, K) the gate's choice. It stands unless a balancer has a bias, with its ties and all.
        """
        batch, self.batch = self.batch, None
        if not self.training and self.biasing is None:
            return None
        if batch is None or math.prod(batch.shape) != logits.shape[0]:
            batch = Batch(logits.shape[:1])
        replay = indices.view(*batch.shape, -1) if self.biasing is None else None
        given = logits.view(*batch.shape, -1)
        routing = self(given, mask=batch.mask, replay=replay, document_ids=batch.document_ids)
        return None if self.biasing is None and not self.with_loss else routing
