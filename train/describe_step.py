"""A rehearsal of one optimizer step: rank 0 of any world, with tensors that have shapes and no memory.

The model, its sharding, its collectives and its balancers are those of a real run; only the numbers are missing
(FakeTensorMode) and nobody answers (torch's "fake" process group). So memory and traffic are counted, not derived.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import itertools
import warnings
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch._subclasses import FakeTensorMode
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from ..balancers import balance_step, route, routers
from ..balancers.balancer import StatefulModule
from ..models import GPT, Block, Dispatcher
from .config import Config
from .describe_meter import ACTIVATIONS, GRADIENTS, OPTIMIZER, PARAMETERS, Meter
from .layout import Layout, microbatches
from .optim import clip_gradients, gradient_norm, make_optimizer, router_gradient_norm
from .parallel import lay_out, make_meshes, moe_layers
from .step import tolerate_nan

Numbers = dict[tuple[str, ...], float]

ALONE = 4  # MoE layers that are rehearsed one by one; of deeper models three and four, and the rest follows
OBSERVED = 4  # microbatches that stand for all that come before the last one


def rehearse(config: Config, layout: Layout, autocast: torch.dtype | None) -> Numbers:
    """Count one optimizer step of `config` on rank 0 of `layout`, every expert as popular as any other.

    Returns bytes under ("parameters",), ("gradients",), ("optimizer",), ("saved",) = activations that a forward leaves for
    its backward, ("balancers",) = what they keep until the step ends; ("peak", stretch, kind) = alive by kind when most was, in
    each stretch of the step; ("calls" | "bytes", what, operation) = the collectives and what they send.

    Every MoE layer adds as much as the one before it, so of a deep model three and four are rehearsed. The step is cut into
    stretches in which that holds for the peak too: it stays at the same place.

    Raises:
        ValueError: if torch.distributed is initialised, or something in the step depends on a value.
    """
    depth = config.model.num_layers - config.model.num_dense_layers
    with _pretended_ranks(layout.world), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about itself and about a process group that is not one
        if depth <= ALONE:
            return _Rehearsal(config, layout, autocast).run()
        fewer = _Rehearsal(_with_moe_layers(config, ALONE - 1), layout, autocast).run()
        more = _Rehearsal(_with_moe_layers(config, ALONE), layout, autocast).run()
    return {key: fewer[key] + (more[key] - fewer[key]) * (depth - ALONE + 1) for key in fewer}


def peaks(numbers: Numbers) -> dict[str, dict[str, int]]:
    """{stretch of the step: {kind: bytes}} when most are alive in it."""
    found: dict[str, dict[str, int]] = {}
    for key, size in numbers.items():
        if key[0] == "peak":
            found.setdefault(key[1], {})[key[2]] = round(size)
    return found


@contextlib.contextmanager
def _pretended_ranks(world: int) -> Iterator[None]:
    if world == 1:
        yield
        return
    if dist.is_initialized():
        raise ValueError("describe pretends to be ranks of its own; call it where torch.distributed is not initialised")
    dist.init_process_group("fake", rank=0, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _with_moe_layers(config: Config, count: int) -> Config:
    model = dataclasses.replace(config.model, num_layers=config.model.num_dense_layers + count)
    return dataclasses.replace(config, model=model)


class _Rehearsal:
    def __init__(self, config: Config, layout: Layout, autocast: torch.dtype | None) -> None:
        self.config, self.layout, self.autocast = config, layout, autocast
        self.numbers: Numbers = defaultdict(float)
        self.meter = Meter()
        self.replicas: set[str] = set()  # those that sum gradients by all-reduce
        self.groups: dict[str, str] = {}  # name of a process group: what its ranks share

    def run(self) -> Numbers:
        run, meter, numbers, answers = self.config.run, self.meter, self.numbers, _Answers()
        share = microbatches(run.batch, run.microbatch, self.layout.world)
        model = self._build(answers)
        with FakeTensorMode(allow_non_fake_inputs=True), answers, meter:
            model.to_empty(device="cpu")
            for module in model.modules():
                if isinstance(module, StatefulModule):
                    module.statistics_to(torch.device("cpu"))
            parameters = list(model.parameters())
            optimizer = make_optimizer(model, self.config.optim)
            numbers["parameters",] = meter.tag([*parameters, *model.buffers()], PARAMETERS)
            _give_gradients(parameters)
            optimizer.step()  # makes the moments, which every step but the first finds
            optimizer.zero_grad()
            moments = [value for state in optimizer.state.values() for value in state.values()]
            numbers["optimizer",] = meter.tag(moments, OPTIMIZER)
            for module in model.modules():
                if isinstance(module, FSDPModule):  # gathers once, so that its storages are known
                    module.unshard()
                    module.reshard()

            # Microbatches are alike. The last one finds what the others left, so it is the one that is rehearsed.
            if share > 1:
                _give_gradients(parameters)
                meter.tag([parameter.grad for parameter in parameters], GRADIENTS)
                self._observe(model, share - 1)
            meter.mark()
            meter.sent.clear()
            after_forward = self._microbatch(model)
            for key in [key for key in numbers if key[0] in ("calls", "bytes")]:
                numbers[key] *= share
            numbers["gradients",] = meter.tag([parameter.grad for parameter in parameters], GRADIENTS)
            numbers["balancers",] = meter.live[ACTIVATIONS]
            numbers["saved",] = after_forward - meter.live[ACTIVATIONS]  # what its backward has used up

            router_gradient_norm(model)
            clip_gradients(parameters, gradient_norm(parameters), self.config.optim.clip)
            if moe_layers(model):
                balance_step(model)
            self._collectives("balancing")
            optimizer.step()
            self._stretch("update")
        return dict(numbers)

    def _build(self, answers: _Answers) -> GPT:
        if self.layout.world == 1:
            with torch.device("meta"):
                model = GPT(self.config.model)
        else:
            meshes = make_meshes(self.layout, "cpu", self.config.parallel.timeout)
            sharded = [("dense", meshes.dense), ("experts", meshes.expert_dp)]
            if self.layout.ep == 1:
                sharded = [("weights", meshes.dense)]  # experts travel with the rest of their block
            for what, mesh in sharded:
                self.groups |= {group.group_name: what for group in mesh.get_all_groups()}
                self.replicas |= {group.group_name for group in mesh.get_all_groups()[:-1]}
            model = lay_out(self.config.model, meshes, self.autocast)
        tolerate_nan(model)
        model.set_activation_checkpointing(self.config.run.activation_checkpointing)
        for layer in moe_layers(model):
            layer.dispatcher = _EvenDispatcher(layer.dispatcher, answers)
        return model

    def _microbatch(self, model: GPT) -> int:
        """Forward and backward of one microbatch. Returns the bytes of activations that are alive between the two."""
        run, blocks = self.config.run, cast(list[Block], list(model.blocks))
        tokens = torch.zeros(run.microbatch, run.seq_len, dtype=torch.int64)
        allowed = None
        if self.autocast is None or importlib.util.find_spec("flash_attn") is None:
            # Only flash-attn does without: packed documents need a mask of all pairs of tokens.
            allowed = torch.ones(run.microbatch, 1, run.seq_len, run.seq_len, dtype=torch.bool)

        def with_documents(module: nn.Module, inputs: Any) -> Any:
            # What `sequence_context` makes of documents, whose boundaries it would have to read.
            return inputs[0], dataclasses.replace(inputs[1], document_ids=tokens, allowed=allowed)

        def watch(index: int) -> Any:
            # The backward of a block begins when the gradient of its output is there; the stretch before it ends with that.
            after = len(blocks) - 1 - index
            place = ("head", "last block", "last block but one")[after] if after < 3 else f"block {index + 2}"

            def hook(module: nn.Module, inputs: Any, out: Tensor) -> None:
                out.register_hook(lambda _: self._stretch(f"backward of the {place}"))

            return hook

        hooks = [block.register_forward_hook(watch(index)) for index, block in enumerate(blocks)]
        hooks += [block.register_forward_pre_hook(with_documents) for block in blocks]
        with torch.autocast("cpu", dtype=self.autocast) if self.autocast else contextlib.nullcontext():
            loss = model(tokens, tokens).loss
        between = self.meter.live[ACTIVATIONS]
        self._stretch("forward")
        self._collectives("forward")
        loss.backward()
        del loss
        self._stretch("backward of the first block")
        self._collectives("backward")
        for hook in hooks:
            hook.remove()
        return between

    @torch.no_grad()
    def _observe(self, model: GPT, count: int) -> None:
        """Let balancers remember the step's other microbatches, in a few large ones."""
        tokens = self.config.run.microbatch * self.config.run.seq_len
        for router in routers(model).values():
            bias = None if router.biasing is None else router.biasing.selection_bias
            for part in range(min(OBSERVED, count)):
                rows = tokens * len(range(part, count, OBSERVED))
                routing = route(torch.empty(rows, router.num_experts), router.top_k, bias=bias, **router.options)
                for observer in (router.ledger, *router.balancers):
                    observer.observe(routing)

    def _stretch(self, name: str) -> None:
        for kind, size in self.meter.mark().items():
            self.numbers["peak", name, kind] = size

    def _collectives(self, phase: str) -> None:
        for sent in self.meter.sent:
            what = self.groups.get(sent.group, phase)
            if sent.operation == "all_to_all":
                what = "rows" if sent.dtype.is_floating_point else "counts"
            elif phase == "balancing":
                what = phase
            elif sent.operation == "all_reduce" and sent.group not in self.replicas:
                what = "injection"
            self.numbers["calls", what, sent.operation] += 1
            self.numbers["bytes", what, sent.operation] += sent.bytes
        self.meter.sent.clear()


def _give_gradients(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)


class _Answers(TorchDispatchMode):
    """Answers what shapes alone cannot: how many rows an expert or a rank gets. Whatever else asks for a value fails.

    It also knows the shapes of grouped products in every dtype; torch's own are for bfloat16.
    """

    def __init__(self) -> None:
        super().__init__()
        self._shares: Iterator[int] | None = None

    def share(self, rows: int, places: int) -> None:
        """From now on, every `places` values that are asked for are an even split of `rows`; of 0 places, none is known."""
        self._shares = itertools.cycle(len(range(place, rows, places)) for place in range(places)) if places else None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and self._shares is not None:
            return next(self._shares)
        if func is torch.ops.aten._grouped_mm.default:
            left, right, *rest = args
            ends: Tensor = rest[0] if rest else (kwargs or {})["offs"]
            groups = ends.shape if left.dim() == right.dim() == 2 else ()
            return left.new_empty(*groups, left.shape[-2], right.shape[-1])
        return func(*args, **(kwargs or {}))


class _EvenDispatcher:
    """A dispatcher whose ranks and experts are all equally popular."""

    capacity_factor = None  # at even load nothing is dropped

    def __init__(self, dispatcher: Dispatcher, answers: _Answers) -> None:
        self.dispatcher, self.answers = dispatcher, answers

    def dispatch(
        self, x: Tensor, indices: Tensor, mask: Tensor | None = None, *, limited: bool = True
    ) -> tuple[Tensor, Tensor, Any]:
        self.answers.share(indices.numel(), getattr(self.dispatcher, "size", 1))
        rows, counts, plan = self.dispatcher.dispatch(x, indices, mask, limited=False)
        self.answers.share(rows.shape[0], counts.shape[0])  # what experts ask that compute one after the other
        return rows, counts, plan

    def receive(self, rows: Tensor, plan: Any) -> Tensor:
        return self.dispatcher.receive(rows, plan)

    def combine(self, rows: Tensor, weights: Tensor, plan: Any) -> Tensor:
        self.answers.share(0, 0)
        return self.dispatcher.combine(rows, weights, plan)
