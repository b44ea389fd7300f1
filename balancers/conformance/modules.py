"""Adapter for somebody's own router module, found out by looking at it; and how a target on the command line is read.

Shape suffixes: T tokens, E experts, K experts per token.
"""

import importlib
import inspect
import os
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from ..balancer import Balancer
from ..router import Router, routers
from .adapter import Adapter, Decision, NotApplicable, StepReport
from .routers import RouterAdapter

_EXPERTS = ("num_experts", "n_experts", "num_local_experts", "n_routed_experts", "n_expert", "experts")
_TOP_K = ("top_k", "topk", "k", "num_experts_per_tok", "n_activated_experts", "experts_per_token")
_WIDTH = ("d_model", "dim", "hidden_size", "hidden_dim", "embed_dim", "model_dim", "in_features", "input_dim", "n_embd")
_REMEDY = "write an Adapter (docs/conformance.md shows one of ten lines) and check that"


class ModuleAdapter(Adapter):
    """A router class whose constructor takes a width, E and K under usual names, and whose forward takes x (T, width).

    The forward returns indices (T, K) and weights (T, K) in a tuple, in either order and with or without logits (T, E); or an
    object with `indices`, `weights` and perhaps `logits` and `counts`. Used where they exist: `mask` and `document_ids` of the
    forward, `balance_step(group)` or `balance_step()`, `reset_parameters()`, and a buffer (E,) whose name ends with "bias".

    Raises:
        ValueError: where the class does not fit, with the remedy.
    """

    def __init__(self, router_class: type[nn.Module], name: str = "") -> None:
        self.router_class = router_class
        self.name = name or router_class.__name__
        self.experts_name = _named(router_class, _EXPERTS, "the number of experts")
        self.top_k_name = _named(router_class, _TOP_K, "the experts per token")
        self.width_name = _named(router_class, _WIDTH, "the width of its input")
        taken = inspect.signature(router_class.forward).parameters
        self.takes_mask, self.takes_documents = "mask" in taken, "document_ids" in taken
        step = getattr(router_class, "balance_step", None)
        self.updates = step is not None
        self.sums_over_ranks = step is not None and "group" in inspect.signature(step).parameters
        self.places = self._places()

    def build(self, num_experts: int, top_k: int, **options: Any) -> nn.Module:
        sizes = {self.experts_name: num_experts, self.top_k_name: top_k, self.width_name: num_experts}
        return self.router_class(**sizes)

    def route(
        self, router: nn.Module, x: Tensor, *, mask: Tensor | None = None, document_ids: Tensor | None = None
    ) -> Decision:
        context = {"mask": mask} if self.takes_mask else {}
        context |= {"document_ids": document_ids} if self.takes_documents else {}
        out = router(x, **{name: value for name, value in context.items() if value is not None})
        if hasattr(out, "indices") and hasattr(out, "weights"):
            return Decision(out.indices, out.weights, getattr(out, "logits", None), getattr(out, "counts", None))
        indices, weights, logits = self.places
        return Decision(out[indices], out[weights], None if logits is None else out[logits])

    def bias(self, router: nn.Module) -> Tensor | None:
        buffers = [buffer for name, buffer in router.named_buffers() if name.endswith("bias") and buffer.dim() == 1]
        return buffers[0] if len(buffers) == 1 else None

    def step(self, model: nn.Module, group: dist.ProcessGroup | None = None) -> StepReport:
        if not self.updates:
            raise NotApplicable("has no balance_step")
        for router in model.modules():
            if isinstance(router, self.router_class):
                balance_step: Any = router.balance_step
                report = balance_step(group) if self.sums_over_ranks else balance_step()
        return report if isinstance(report, StepReport) else StepReport()

    def _places(self) -> tuple[int, int, int | None]:
        """Where indices, weights and logits are in what the forward returns, seen where K, E and T all differ."""
        rows, experts, top_k = 5, 8, 2
        try:
            router = self.build(experts, top_k)
            out: Any = router(torch.randn(rows, experts))
        except Exception as error:
            raise ValueError(f"{self.name} cannot route a tensor of shape (5, 8): {error}; {_REMEDY}") from error
        if routers(router):
            raise ValueError(f"{self.name} holds an evenload.Router; check that alone, or subclass RouterAdapter for the whole")
        if hasattr(out, "indices") and hasattr(out, "weights"):
            return 0, 0, None
        parts = list(out) if isinstance(out, tuple | list) else [out]
        shaped = [(place, part) for place, part in enumerate(parts) if isinstance(part, Tensor)]
        indices = [place for place, part in shaped if part.shape == (rows, top_k) and not part.is_floating_point()]
        weights = [place for place, part in shaped if part.shape == (rows, top_k) and part.is_floating_point()]
        logits = [place for place, part in shaped if part.shape == (rows, experts) and part.is_floating_point()]
        if len(indices) != 1 or len(weights) != 1:
            shapes = ", ".join(f"{part.dtype} {tuple(part.shape)}".removeprefix("torch.") for _, part in shaped) or type(out)
            raise ValueError(
                f"{self.name} returns {shapes} for 5 tokens, 8 experts and top-2; "
                f"wanted are integer indices (5, 2) and weights (5, 2); {_REMEDY}"
            )
        return indices[0], weights[0], logits[0] if len(logits) == 1 else None


def adapter_for(target: Any, name: str = "") -> Adapter:
    """The adapter for an Adapter class or instance, a router class, or a Balancer class (tried in this library's router).

    Raises:
        ValueError: for anything else, naming what would do.
    """
    if isinstance(target, Adapter):
        return target
    if isinstance(target, type) and issubclass(target, Adapter):
        return target()
    if isinstance(target, type) and issubclass(target, Balancer):
        adapter = RouterAdapter([target])
        adapter.name = name or adapter.name
        return adapter
    if isinstance(target, type) and issubclass(target, Router):
        adapter = RouterAdapter(router_class=target)
        adapter.name = name or target.__name__
        return adapter
    if isinstance(target, type) and issubclass(target, nn.Module):
        return ModuleAdapter(target, name)
    raise ValueError(
        f"{name or target!r} is {type(target).__name__}; give a router class (nn.Module), a Balancer class, or an Adapter"
    )


def load_target(target: str) -> Adapter:
    """The adapter for "module:Name", with the module sought on sys.path and in the current folder; see `adapter_for`.

    Raises:
        ValueError: where there is no such module or name.
    """
    module_name, colon, attribute = target.partition(":")
    if not colon or not module_name or not attribute:
        raise ValueError(f"target {target!r}; write evenload:BALANCERS, transformers:ARCHITECTURE, or my_module:MyRouter")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise ValueError(f"target {target!r}: importing {module_name} fails: {error}") from error
        raise ValueError(f"target {target!r}: there is no module {module_name} here or on sys.path") from error
    if not hasattr(module, attribute):
        classes = [name for name, value in vars(module).items() if isinstance(value, type) and value.__module__ == module_name]
        raise ValueError(f"target {target!r}: {module_name} has no {attribute}; it has {', '.join(classes) or 'no classes'}")
    return adapter_for(getattr(module, attribute), target)


def _named(router_class: type[nn.Module], choices: tuple[str, ...], what: str) -> str:
    taken = inspect.signature(router_class.__init__).parameters
    found = [name for name in choices if name in taken]
    if not found:
        raise ValueError(
            f"{router_class.__name__}({', '.join(list(taken)[1:])}) takes {what} under no name known here "
            f"({', '.join(choices[:4])}, ...); {_REMEDY}"
        )
    return found[0]
