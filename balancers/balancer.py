"""What a balancer is: five questions about a router's decisions, all optional.

    selection_bias   what to add to the selection values
    inject           what gradient to add, and the value of the loss it belongs to
    observe          what to remember of a forward pass
    update           how to change once per optimizer step, given sums over all ranks
    report           what to show

A new balancer is one class in anybody's file; nothing here needs to know its name. See docs/your_own_balancer.md.
"""

import math
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from .collective import Sums
from .routing import Routing, Space

Update = Generator[Sums, Any, None]


@dataclass(frozen=True)
class Injection:
    """A loss that enters as a gradient.

    Attributes:
        value: 0-dim, the loss with its coefficient, for the report.
        scores: (T, E) its gradient with respect to the scores, or None.
        logits: (T, E) its gradient with respect to the raw logits, or None.

    Both gradients are those of a mean over the microbatch's real tokens, and 0 on padding rows.
    """

    value: Tensor
    scores: Tensor | None = None
    logits: Tensor | None = None


class StatefulModule(nn.Module):
    """A module with state and statistics, which keep their dtype through `.to(bfloat16)` and the like but follow the device.

    State (`add_state`) is a buffer, part of the state dict. A statistic (`add_statistic`) is gathered over one optimizer step
    and starts anew after it. It is this rank's own and not a buffer: DistributedDataParallel overwrites buffers with those of
    rank 0 before a forward.
    """

    def __init__(self) -> None:
        super().__init__()
        self._initial_state: dict[str, tuple[float, torch.dtype]] = {}
        self._initial_statistics: dict[str, float] = {}

    def add_state(self, name: str, shape: tuple[int, ...], *, fill: float = 0.0, dtype: torch.dtype = torch.float32) -> None:
        self.register_buffer(name, torch.full(shape, fill, dtype=dtype))
        self._initial_state[name] = fill, dtype

    def add_statistic(
        self, name: str, shape: tuple[int, ...] = (), *, fill: float = 0, dtype: torch.dtype = torch.int64
    ) -> None:
        setattr(self, name, torch.full(shape, fill, dtype=dtype))
        self._initial_statistics[name] = fill

    def statistics(self) -> dict[str, Tensor]:
        """What this module has gathered in the current step, by name."""
        return {name: getattr(self, name) for name in self._initial_statistics}

    def reset_parameters(self) -> None:
        """Fill state and statistics of this module with their initial values (needed after meta-device construction)."""
        with torch.no_grad():
            for name, (fill, _) in self._initial_state.items():
                self.get_buffer(name).fill_(fill)
        self.reset_statistics()

    def reset_statistics(self) -> None:
        """Start the statistics anew, in place."""
        with torch.no_grad():
            for name, fill in self._initial_statistics.items():
                getattr(self, name).fill_(fill)

    def statistics_to(self, device: torch.device) -> None:
        """Bring the statistics to the device of the tokens (they may have been left on the meta device)."""
        for name, statistic in self.statistics().items():
            fresh = torch.full(statistic.shape, self._initial_statistics[name], dtype=statistic.dtype, device=device)
            setattr(self, name, fresh if statistic.is_meta else statistic.to(device))

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        for name, (_, dtype) in self._initial_state.items():
            self._buffers[name] = self.get_buffer(name).to(dtype)  # with assign=True a checkpoint could bring another one
        self.reset_statistics()  # what was gathered belongs to the state that has just been replaced

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "StatefulModule":
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            if buffer is not None:
                self._buffers[name] = _same_dtype(buffer, self._buffers[name])
        for name, statistic in self.statistics().items():
            setattr(self, name, _same_dtype(statistic, fn(statistic)))
        return self


def _same_dtype(before: Tensor, after: Any) -> Tensor:
    # Not after.to(before.dtype): the detour through a narrow type would already have rounded it.
    return after if after.dtype == before.dtype else before.to(after.device)


class Balancer(StatefulModule):
    """Base class of every balancer. Subclass it, answer the questions you need, leave the others.

    Attributes:
        name: what configurations, reports and the state dict call it; by default the class's name.
        space: what its selection bias is added to, "logits" or "scores".
    """

    name: ClassVar[str] = ""
    space: Space = "logits"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.name = cls.name or cls.__name__

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 0
        self.top_k = 0
        self.score = ""
        self.reachable = 0

    @property
    def sets_bias(self) -> bool:
        """Whether it answers `selection_bias`; a router takes at most one such balancer."""
        return type(self).selection_bias is not Balancer.selection_bias

    @property
    def injects(self) -> bool:
        """Whether it answers `inject`."""
        return type(self).inject is not Balancer.inject

    @property
    def updates(self) -> bool:
        """Whether it answers `update`."""
        return type(self).update is not Balancer.update

    def bind(self, num_experts: int, top_k: int, score: str, reachable: int) -> None:
        """Called once by the router that owns this balancer; creates the buffers.

        Raises:
            ValueError: if this instance already serves a router, or does not fit the router's `score`.
        """
        if self.num_experts:
            raise ValueError(
                f"this {type(self).__name__} already belongs to a router; every router needs its own instance "
                "(build them per layer, for instance with make_balancers)"
            )
        self.num_experts, self.top_k, self.score, self.reachable = num_experts, top_k, score, reachable
        self.build()

    def build(self) -> None:
        """Create buffers with `add_state` and `add_statistic`, refuse routers that do not fit.

        Known here: `num_experts`, `top_k`, `score`, and `reachable`, the number of experts a token can choose from (fewer
        than `num_experts` in group-limited routing).
        """

    def selection_bias(self, selection: Tensor, mask: Tensor | None) -> Tensor:
        """The bias, (E,) or (T, E), to add to `selection` (T, E), which is the logits or the scores as `space` says."""
        raise NotImplementedError  # a router asks only those who answer

    def inject(self, routing: Routing, documents: Tensor) -> Injection:
        """The gradient to add in this forward. `documents` (T,) int64 numbers the document of each token, from 0.

        Runs without autograd, in training only, and again when activation checkpointing recomputes: change nothing here.
        """
        raise NotImplementedError  # a router asks only those who answer

    def observe(self, routing: Routing) -> None:
        """Remember what the step's update will need. Called once per training forward, never in eval or in recomputation."""

    def update(self) -> Update | None:
        """Once per optimizer step: yield local sums (a tensor or a tuple of tensors), receive them summed over all ranks.

        Integer sums are exact and floating-point sums are added in rank order. Every rank must yield the same shapes and
        dtypes in the same order, whatever its data. Change buffers in place. Without a `yield` it is an ordinary method that
        changes this rank's state alone.
        """
        return None

    def report(self) -> dict[str, Tensor]:
        """{metric: 0-dim tensor} to add to the step's report, after the update."""
        return {}


class BalancerList(nn.Module):
    """A router's balancers in order, by position or by name. The state dict calls them by name, so that a state cannot be
    loaded into another balancer, and their order does not matter."""

    def __init__(self, balancers: Iterable[Balancer]) -> None:
        super().__init__()
        for balancer in balancers:
            self.add_module(balancer.name, balancer)

    def __iter__(self) -> Iterator[Balancer]:
        return iter(cast(Iterable[Balancer], self._modules.values()))

    def __len__(self) -> int:
        return len(self._modules)

    def __getitem__(self, key: int | str) -> Balancer:
        return cast(Balancer, self._modules[key]) if isinstance(key, str) else list(self)[key]


def require_nonnegative(balancer: str, **values: float) -> None:
    for name, value in values.items():
        if not (isinstance(value, Real) and 0 <= value < math.inf):
            raise ValueError(f"{balancer}: {name}={value!r}; it must be a number >= 0 (0 switches it off)")
