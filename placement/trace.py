"""The demand of a real run: how many tokens every expert of every layer received in every microbatch.

Placement, replication, packing and scheduling are all planned from this one array. Expert ids are logical: the router's own,
whatever slots the experts live in.

Shape suffixes: M microbatches, L layers, E experts.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..balancers import routers
from ..balancers.recompute import autograd_is_idle


@dataclass
class Demand:
    """A recorded trace.

    Attributes:
        layers: qualified name of each layer's router, in model order.
        microbatches: one (L, E) int64 tensor of token counts per forward pass of the model, on the CPU; padding excluded.
    """

    layers: tuple[str, ...]
    microbatches: list[Tensor] = field(default_factory=list)

    @property
    def counts(self) -> Tensor:
        """(M, L, E) int64.

        Raises:
            ValueError: if nothing was recorded.
        """
        if not self.microbatches:
            raise ValueError("this trace is empty: run the model inside record_demand(model), and compile it there if at all")
        return torch.stack(self.microbatches)

    def save(self, path: str | Path) -> None:
        torch.save({"layers": list(self.layers), "counts": self.counts}, path)

    @classmethod
    def load(cls, path: str | Path) -> "Demand":
        """Read what `save` wrote; executes no code."""
        saved = torch.load(path, weights_only=True)
        return cls(tuple(saved["layers"]), list(saved["counts"].unbind()))


@contextmanager
def record_demand(model: nn.Module) -> Iterator[Demand]:
    """Record every forward of `model` inside the block, in training and in eval, changing nothing.

    A microbatch is complete once every router has run; under activation checkpointing the recomputation is not recorded.

    Raises:
        ValueError: if the model has no Router, or its routers differ in their number of experts.
    """
    found = routers(model)
    if len({router.num_experts for router in found.values()}) != 1:
        sizes = {name: router.num_experts for name, router in found.items()}
        raise ValueError(f"record_demand needs routers with one number of experts; this {type(model).__name__} has {sizes}")
    demand = Demand(tuple(found))
    rows: dict[str, Tensor] = {}

    def note(name: str, routing: Any) -> None:
        if not autograd_is_idle(routing.counts):  # activation checkpointing computes these tokens again
            return
        if name in rows:
            missing = next(layer for layer in found if layer not in rows)
            raise RuntimeError(
                f"record_demand: router {name!r} ran twice before {missing!r} ran; every router must run once a pass"
            )
        rows[name] = routing.counts.detach().cpu()
        if len(rows) == len(found):
            demand.microbatches.append(torch.stack([rows[layer] for layer in found]))
            rows.clear()

    hooks = [
        router.register_forward_hook(lambda module, args, routing, name=name: note(name, routing))
        for name, router in found.items()
    ]
    try:
        yield demand
    finally:
        for hook in hooks:
            hook.remove()
