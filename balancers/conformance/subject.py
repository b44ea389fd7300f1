"""An adapter under test, and what the checks share.

Shape suffixes: T tokens, E experts, K experts per token.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from .adapter import Adapter, Decision, NotApplicable, StepReport, prepared
from .processes import RankPool

EXPERTS, TOP_K = 8, 2
# Their result's size depends on data, even where the compiler later learns what it is.
_WAITS = {"bincount", "nonzero", "item", "tolist", "unique", "masked_select"}


class Failed(Exception):
    """A check's verdict; the message is the evidence."""


class Subject:
    """Builds, routes and steps through the adapter; starts ranks only when a check needs them."""

    def __init__(self, adapter: Adapter, pool: RankPool) -> None:
        self.adapter, self.pool = adapter, pool

    def build(self, num_experts: int = EXPERTS, top_k: int = TOP_K, **options: Any) -> nn.Module:
        return prepared(self.adapter, num_experts, top_k, **options)

    def route(self, router: nn.Module, x: Tensor, **context: Tensor) -> Decision:
        return self.adapter.route(router, x, **context)

    def step(self, model: nn.Module) -> StepReport:
        return self.adapter.step(model)

    def try_step(self, model: nn.Module) -> StepReport:
        """As `step`; an empty report where there is no step."""
        try:
            return self.adapter.step(model)
        except NotApplicable:
            return StepReport()

    def state(self, router: nn.Module) -> dict[str, Tensor]:
        """A copy of what balancing carries."""
        return {name: tensor.detach().clone() for name, tensor in self.adapter.state(router).items()}

    def require_changing_state(self) -> None:
        """NotApplicable unless training changes some state, in the forward or at the step."""
        router = self.build()
        before = self.state(router)
        self.route(router, batch(24))
        forward = self.state(router)
        self.try_step(router)
        if differing(before, forward) is None and differing(before, self.state(router)) is None:
            raise NotApplicable("training changes no balancing state" if before else "carries no balancing state")

    @cached_property
    def compiled(self) -> tuple[str, dict[str, Tensor], dict[str, Tensor]]:
        """(why it is not one graph without syncs, or ""; eager state; compiled state), after a forward and after a step."""
        waits: list[str] = []

        def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
            waits.extend(_waiting(graph))
            return graph.forward

        eager, router = self.build(), self.build()
        self._one_forward(eager)
        torch._dynamo.reset()
        try:
            self._one_forward(torch.compile(router, backend=backend, fullgraph=True))
            error = f"the graph waits for data in {waits[0]}" if waits else ""
        except Exception as failure:
            error = f"torch.compile(fullgraph=True) fails: {one_line(failure)}"
            torch._dynamo.reset()
            router = self.build()
            self._one_forward(torch.compile(router, backend="eager"))
        states = []
        for each in (eager, router):
            kept = self.state(each)
            self.try_step(each)
            states.append(kept | {f"{name} after the step": value for name, value in self.state(each).items()})
        return error, states[0], states[1]

    def _one_forward(self, forward: Any) -> None:
        self.route(forward, batch(24).requires_grad_()).weights.sum().backward()


def _waiting(graph: torch.fx.GraphModule) -> list[str]:
    """Operations whose result's value or size depends on data: on a device, everything waits for them."""
    values = [(node, node.meta.get("example_value")) for node in graph.graph.nodes]
    names = [str(getattr(node.target, "__name__", node.target)) for node, value in values if _depends_on_data(value)]
    called = [str(getattr(node.target, "__name__", node.target)) for node in graph.graph.nodes]
    return [name for name in called if name in _WAITS] + [name for name in names if not name.startswith("sym_")]


def _depends_on_data(value: Any) -> bool:
    return isinstance(value, Tensor | torch.SymInt | torch.SymFloat | torch.SymBool) and bool(free_unbacked_symbols(value))


def batch(tokens: int, experts: int = EXPERTS, *, seed: int = 0) -> Tensor:
    """(T, E) uneven logits without ties."""
    return torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed)) + torch.linspace(1, 0, experts)


def certain(choice_TK: Tensor, experts: int, height: float = 30.0) -> Tensor:
    """(T, E) logits of tokens that are sure of their K experts."""
    return torch.full((choice_TK.shape[0], experts), -height).scatter(1, choice_TK, height)


def balanced_choice(experts: int, top_k: int) -> Tensor:
    """(E, K) choices that give every expert K tokens."""
    return (torch.arange(experts)[:, None] + torch.arange(top_k)) % experts


def collapsed_choice(experts: int, top_k: int, first: int = 0) -> Tensor:
    """(E, K) choices of the same K experts."""
    return (first + torch.arange(top_k)).expand(experts, top_k)


def chosen_counts(indices_TK: Tensor, experts: int) -> Tensor:
    """(E,) int64 times that each expert occurs."""
    flat = indices_TK.flatten().long()
    return torch.zeros(experts, dtype=torch.int64).scatter_add_(0, flat, torch.ones_like(flat))


def differing(found: dict[str, Tensor], expected: dict[str, Tensor], *, exact: bool = True) -> str | None:
    """The first name whose tensors differ (or that is missing), else None. NaN equals NaN."""
    for name, value in expected.items():
        other = found.get(name)
        if other is None or other.dtype != value.dtype or other.shape != value.shape:
            return name
        if not (_identical(other, value) if exact else close(other, value)):
            return name
    return None


def _identical(found: Tensor, expected: Tensor) -> bool:
    return bool(((found == expected) | (found.isnan() & expected.isnan())).all())


def short(name: str) -> str:
    """The last two parts of a qualified name."""
    return ".".join(name.split(".")[-2:])


def close(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found.double(), expected.double(), rtol=1e-4, atol=1e-6, equal_nan=True)


def one_line(error: BaseException) -> str:
    """An error on one line: its kind and the first line of its message."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def refuses(action: Callable[[], Any]) -> bool:
    """Whether the action raises."""
    try:
        action()
    except NotApplicable:
        raise
    except Exception:
        return True
    return False
