"""Rows 6, 12, 26: microbatches and ranks.

Shape suffixes: T tokens, E experts.
"""

import torch
from torch import Tensor
from torch import distributed as dist

from .adapter import Adapter, NotApplicable, StepReport, prepared
from .processes import WORLD
from .subject import EXPERTS, TOP_K, Failed, Subject, batch, close, differing

State = dict[str, Tensor]


def accumulation(subject: Subject) -> str:
    """Row 6."""
    shown = []
    try:
        one, four = (subject.adapter.gradient_of_copies(copies) for copies in (1, 4))
        if not close(four, one):
            ratio = float((four.double() * one).sum() / one.double().square().sum())
            times = f"{ratio:.3g} times" if abs(ratio - 1) > 0.01 else "not exactly"
            raise Failed(f"4 equal microbatches give {times} the gate's gradient that one of them gives")
        shown.append("gradients do not depend on the number of microbatches")
    except NotApplicable:
        pass

    local = subject.adapter.scope == "microbatch"
    x = batch(40)
    whole = _stepped(subject.adapter, [x])
    parts = [x, x] if local else list(x.split([3, 20, 17]))
    _compare(_stepped(subject.adapter, parts), whole, f"{len(parts)} microbatches instead of one batch")
    if subject.adapter.updates or _reported(whole):
        shares = [(x,)] * WORLD if local else [(part,) for part in x.split([5, 25, 0, 10])]
        for found in subject.pool.run(_step_of_rank, subject.adapter, shares):
            _compare(found, whole, f"{WORLD} ranks instead of one")
        what = "by definition each microbatch for itself: equal on copies" if local else "uneven splits equal one batch"
        shown.append(f"{what}, on {WORLD} ranks too")
    if not shown:
        raise NotApplicable("nothing is accumulated and no gradient reaches the gate")
    return "; ".join(shown)


def empty_rank(subject: Subject) -> str:
    """Row 12."""
    router = subject.build()
    x = torch.zeros(0, EXPERTS, requires_grad=True)
    decision = subject.route(router, x)
    if decision.indices.shape != (0, TOP_K):
        raise Failed(f"without tokens it returns indices of shape {tuple(decision.indices.shape)}")
    if not decision.weights.requires_grad:
        raise Failed("without tokens the weights are cut off from the graph, so a backward hangs or raises on that rank")
    subject.adapter.backward(router, decision.weights.sum())
    gate = subject.adapter.gate(router)
    if gate is not None and gate.grad is None:
        raise Failed("without tokens the gate gets no gradient, and gradient reduction waits for it")
    if gate is not None and gate.grad is not None and not (gate.grad == 0).all():
        raise Failed("without tokens the gate's gradient is not zero")
    report = subject.try_step(router)
    for name, value in subject.state(router).items():
        if value.is_floating_point() and not value.isfinite().all():
            raise Failed(f"{name} is not finite after a step without tokens")
    for name, value in report.losses.items():
        if value.requires_grad and not value.isfinite().all():
            raise Failed(f"{name} is {float(value.detach().mean())} without tokens, and it is added to the training loss")
    if not subject.adapter.updates or not subject.adapter.sums_over_ranks:
        return "forward, backward and step work without tokens"
    states = subject.pool.run(_step_of_rank, subject.adapter, [(batch(n),) for n in (24, 0, 0, 0)])
    for found in states:
        _compare(found, _stepped(subject.adapter, [batch(24)]), "three empty ranks beside a full one")
    return f"forward, backward and {subject.adapter.step_call} work without tokens, alone and beside full ranks"


def tensor_parallel(subject: Subject) -> str:
    """Row 26. Ranks 0, 1 and ranks 2, 3 hold the same tokens: the group of a step is {0, 2} or {1, 3}."""
    parts = list(batch(20).split([9, 11]))
    alone = _stepped(subject.adapter, parts)
    if not subject.adapter.sums_over_ranks or not (subject.adapter.updates or _reported(alone)):
        raise NotApplicable("sums nothing over ranks")
    for found in subject.pool.run(_step_of_group, subject.adapter, [(parts[rank // 2],) for rank in range(WORLD)]):
        counted, right = (sum(int(v.sum()) for name, v in each.items() if name == "reported counts") for each in (found, alone))
        if counted > right:
            raise Failed(f"{counted} assignments are counted where the ranks with distinct tokens hold {right}")
        changed = differing(_state_of(found), _state_of(alone), exact=False)
        if changed is not None:
            raise Failed(f"{changed} is not that of the distinct tokens when ranks share tokens")
    return "sums run over the ranks with distinct tokens"


def _compare(found: State, expected: State, setting: str) -> None:
    changed = differing(_state_of(found), _state_of(expected), exact=False)
    if changed is not None:
        raise Failed(f"{setting}: {changed} differs after the step")


def _state_of(outcome: State) -> State:
    return {name: value for name, value in outcome.items() if name != "reported counts"}


def _reported(outcome: State) -> bool:
    return "reported counts" in outcome


def _stepped(adapter: Adapter, parts: list[Tensor], group: dist.ProcessGroup | None = None) -> State:
    """State after one step over the microbatches, and the counts that it reports."""
    router = prepared(adapter, EXPERTS, TOP_K)
    for part in parts:
        adapter.route(router, part)
    try:
        report = adapter.step(router, group)
    except NotApplicable:
        report = StepReport()
    state = {name: value.detach().clone() for name, value in adapter.state(router).items()}
    return state if report.counts is None else state | {"reported counts": report.counts[0].clone()}


def _step_of_rank(adapter: Adapter, rank: int, distinct: dist.ProcessGroup, part: Tensor) -> State:
    return _stepped(adapter, [part])


def _step_of_group(adapter: Adapter, rank: int, distinct: dist.ProcessGroup, part: Tensor) -> State:
    return _stepped(adapter, [part], distinct)
