"""Rows 4, 5, 7, 8, 9, 15, 20, 22: buffers and statistics over a router's life.

Shape suffixes: T tokens, E experts.
"""

import gc
import io
import warnings
import weakref

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from .adapter import NotApplicable
from .subject import Failed, Subject, batch, differing, short


def eval_leak(subject: Subject) -> str:
    """Row 4."""
    subject.require_changing_state()
    router = subject.build()
    subject.route(router, batch(24))
    before = subject.state(router)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            subject.route(router.eval(), batch(24, seed=1))
        changed = differing(subject.state(router), before)
        if changed is not None:
            raise Failed(f"an eval forward {'' if grad else 'under no_grad '}changes {changed}")
    plain = subject.build()
    subject.route(plain, batch(24))
    for each in (router.train(), plain):
        subject.try_step(each)
    changed = differing(subject.state(router), subject.state(plain))
    if changed is not None:
        raise Failed(f"after an eval forward the step computes another {changed}")
    return "eval forwards leave every buffer and the next step alone, with and without grad"


def recompute(subject: Subject) -> str:
    """Row 5."""
    subject.require_changing_state()
    outcomes = {}
    for kind in ("none", "non-reentrant", "reentrant"):
        router = subject.build()
        x = batch(24).requires_grad_()

        def weights(x: torch.Tensor, router: nn.Module = router) -> torch.Tensor:
            return subject.route(router, x).weights

        out = weights(x) if kind == "none" else checkpoint(weights, x, use_reentrant=kind == "reentrant")
        out.sum().backward()
        kept = subject.state(router)
        subject.try_step(router)
        outcomes[kind] = kept | {f"{name} after the step": value for name, value in subject.state(router).items()}
        changed = differing(outcomes[kind], outcomes["none"])
        if changed is not None:
            raise Failed(f"{kind} activation checkpointing gives another {changed}")
    _, eager, compiled = subject.compiled
    changed = differing(compiled, eager, exact=False)
    if changed is not None:
        raise Failed(f"torch.compile gives another {changed}")
    return "equal with both kinds of checkpointing and under torch.compile"


def dtype(subject: Subject) -> str:
    """Row 7."""
    router = subject.build()
    counts = subject.route(router, batch(24)).counts
    before = subject.state(router)
    if not before and counts is None:
        raise NotApplicable("carries no balancing state and returns no counts")
    if counts is not None and counts.is_floating_point():
        raise Failed(f"counts are {counts.dtype}; only integers stay exact")
    for narrow in (torch.bfloat16, torch.float16):
        router = subject.build()
        subject.route(router, batch(24))
        subject.try_step(router)
        before = subject.state(router)
        router.to(narrow)
        _require_kept(subject.state(router), before, f"model.to({narrow})")
        subject.route(router, batch(24).to(narrow))
        subject.try_step(router)
        for name, value in subject.state(router).items():
            if value.dtype != before[name].dtype:
                raise Failed(f"{short(name)} is {value.dtype} after a step of a {narrow} model")
    shown = [f"state keeps {', '.join(sorted({str(value.dtype) for value in before.values()}))}"] if before else []
    if counts is not None:
        shown.append(f"counts {counts.dtype}")
    return "; ".join(shown).replace("torch.", "")


def _require_kept(found: dict[str, torch.Tensor], before: dict[str, torch.Tensor], after: str) -> None:
    for name, value in before.items():
        if found[name].dtype != value.dtype:
            raise Failed(f"{short(name)} becomes {found[name].dtype} after {after}".replace("torch.", ""))
        if not torch.equal(found[name], value):
            raise Failed(f"{short(name)} keeps its dtype after {after} but was rounded on the way")


def rebinding(subject: Subject) -> str:
    """Row 8."""
    router = subject.build()
    if not subject.adapter.state(router):
        raise NotApplicable("carries no balancing state")
    pointers = {name: tensor.data_ptr() for name, tensor in subject.adapter.state(router).items()}
    subject.route(router, batch(24))
    subject.try_step(router)
    for name, tensor in subject.adapter.state(router).items():
        if tensor.data_ptr() != pointers[name]:
            raise Failed(f"{short(name)} is rebound instead of updated in place")
    file = io.BytesIO()
    torch.save(router.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = subject.build()
    resumed.load_state_dict(saved)
    for each in (router, resumed):
        subject.route(each, batch(24, seed=1))
        subject.try_step(each)
    changed = differing(subject.state(resumed), subject.state(router))
    if changed is not None:
        raise Failed(f"{changed} is not the same in the step after save and load")
    buffers = [name for name in saved if name in subject.adapter.state(router)]
    for name in buffers:
        incomplete = {key: value for key, value in saved.items() if key != name}
        try:
            subject.build().load_state_dict(incomplete)
        except RuntimeError:
            continue
        raise Failed(f"a checkpoint without {short(name)} loads without an error")
    if not buffers:
        return "nothing to save; the next step after loading is bit-identical"
    place = "updated in place, " if subject.adapter.updates else ""
    return f"{place}saved ({', '.join(map(short, buffers))}); the next step after loading is bit-identical"


def meta_init(subject: Subject) -> str:
    """Row 9."""
    direct = subject.build()
    if not subject.adapter.state(direct):
        raise NotApplicable("carries no balancing state")
    with torch.device("meta"):
        late = subject.build()
    late.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in subject.adapter.state(late).values():
            tensor.fill_(77)  # what to_empty leaves behind is garbage
    try:
        subject.adapter.reset(late)
    except AttributeError as error:
        raise Failed(f"nothing initialises its buffers after to_empty: {error}") from error
    changed = differing(subject.state(late), subject.state(direct))
    if changed is not None:
        raise Failed(f"{changed} is garbage after to_empty and the reset")
    return "the reset initialises every buffer"


def graph_breaks(subject: Subject) -> str:
    """Row 15."""
    error, *_ = subject.compiled
    if error:
        raise Failed(error)
    return "compiles with fullgraph=True, forward and backward, and nothing in the graph waits for data"


def silent_no_op(subject: Subject) -> str:
    """Row 20."""
    router = subject.build()
    bias = subject.adapter.bias(router)
    if not subject.adapter.updates and (bias is None or not subject.adapter.selects_by_score):
        raise NotApplicable("no balancing state waits for an update")
    caught = _warnings_of_training(subject, router, step=False)
    if not subject.adapter.updates:
        raise Failed("a selection bias is declared, nothing updates it, and a training run warns of nothing")
    told = [message for message in caught if subject.adapter.step_call in message]
    if len(told) != 1:
        raise Failed(f"a training run that never calls {subject.adapter.step_call} is warned {len(told)} times")
    false_alarm = [m for m in _warnings_of_training(subject, subject.build(), step=True) if subject.adapter.step_call in m]
    if false_alarm:
        raise Failed(f"a run that calls {subject.adapter.step_call} is warned, too: {false_alarm[0]}")
    return f"one warning that names {subject.adapter.step_call}, none where it is called"


def _warnings_of_training(subject: Subject, router: nn.Module, *, step: bool) -> list[str]:
    """Messages while a router trains for 12 optimizer steps of two microbatches (or, without parameters, 300 forwards)."""
    parameters = list(router.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1) if parameters else None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(12 if optimizer else 150):
            for _ in range(2):
                subject.adapter.backward(router, subject.route(router, batch(8).requires_grad_()).weights.sum())
            if step:
                subject.step(router)
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
    return [str(warning.message) for warning in caught]


def hidden_globals(subject: Subject) -> str:
    """Row 22. A router that trains beside another is the router that trains alone; and nothing keeps it alive."""
    outcomes = []
    for beside in (False, True):
        router, other = subject.build(), subject.build()
        gate = subject.adapter.gate(router)
        for seed in range(2):
            if beside:
                subject.route(other, batch(40, seed=9).flip(1))
            subject.adapter.backward(router, subject.route(router, batch(24, seed=seed).requires_grad_()).weights.sum())
            if beside:
                subject.route(other, batch(16, seed=8).flip(1))
            report = subject.try_step(router)
            if beside:
                subject.try_step(other)
        outcome = subject.state(router) | {f"loss {name}": value for name, value in report.losses.items()}
        outcome |= {} if gate is None or gate.grad is None else {"gradient": gate.grad.clone()}
        outcomes.append(outcome)
    changed = differing(outcomes[1], outcomes[0], exact=False)
    if changed is not None:
        raise Failed(f"{changed} changes when another router trains in the same process")
    alive = weakref.ref(router)
    del router, other, gate, report, outcome
    gc.collect()
    if alive() is not None:
        raise Failed("something outside the router keeps it alive after it is deleted")
    return "two routers side by side do not see each other; a deleted one is freed"
