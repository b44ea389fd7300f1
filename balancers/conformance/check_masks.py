"""Rows 1, 2, 16: who counts. Padding, the mask's polarity, packed documents.

Shape suffixes: T tokens, E experts.
"""

import torch
from torch import Tensor

from .adapter import NotApplicable, StepReport
from .subject import TOP_K, Failed, Subject, batch, certain, close, differing, refuses

Outcome = dict[str, Tensor]


def padding(subject: Subject) -> str:
    """Row 1. The batch with padding equals the batch without; either polarity will do here (row 2 asks for it)."""
    x, real = padded_batch()
    plain = _outcome(subject, x[real])
    what = sorted({name.split(" ")[0] for name in plain if name != "gradient"})
    if not what:
        raise NotApplicable("keeps no counts, losses or balancing state that padding could enter")
    if not subject.adapter.takes_mask:
        raise Failed(f"takes no mask, so padding enters its {', '.join(what)}")
    tries = [_outcome(subject, x, mask, real) for mask in (real, ~real)]
    wrong = [_first_difference(found, plain) for found in tries]
    if all(wrong):
        raise Failed(f"with 8 rows of padding among 24, {wrong[0]} differs")
    return f"equal with 8 rows of padding: {', '.join(what)}, gradients"


def polarity(subject: Subject) -> str:
    """Row 2."""
    x, real = padded_batch()
    if not subject.adapter.takes_mask:
        raise NotApplicable("takes no mask (see row 1)")
    outcomes = [_outcome(subject, x, real, real), _outcome(subject, x[real]), _outcome(subject, x[~real])]
    if outcomes[0].keys() == {"gradient"}:
        raise NotApplicable("nothing depends on the mask")
    # Gradients also follow from the main loss, which knows the real rows by itself.
    masked, of_real, of_padding = ({name: v for name, v in each.items() if name != "gradient"} for each in outcomes)
    if _first_difference(masked, of_real) is not None and _first_difference(masked, of_padding) is None:
        raise Failed("mask True means padding: the rows that count are the ones marked False")
    additive = torch.zeros(len(x)).masked_fill(~real, float("-inf"))
    accepted = [
        name
        for name, mask in (("an additive float mask (0 = real, -inf = padding)", additive), ("a mask one row short", real[1:]))
        if not refuses(lambda mask=mask: _outcome(subject, x, mask, real))  # type: ignore[misc]
    ]
    if accepted:
        raise Failed(f"accepted without an error: {', '.join(accepted)}")
    return "True = real token; a wrong dtype or shape is an error"


def packing(subject: Subject) -> str:
    """Row 16. Two documents, each on experts of its own: the pack as a whole looks balanced."""
    if not subject.adapter.per_document:
        raise NotApplicable("nothing here works per sequence or document")
    logits = certain(torch.tensor([[0, 1]] * 4 + [[2, 3]] * 4), 4)
    values = {}
    for name, ids in (("one document", [7] * 8), ("packed", [7] * 4 + [3] * 4)):
        router = subject.build(4, 2)
        subject.route(router, logits, document_ids=torch.tensor(ids))
        values[name] = subject.step(router).losses
    alone = []
    for part in logits.split(4):
        router = subject.build(4, 2)
        subject.route(router, part)
        alone.append(subject.step(router).losses)
    if not alone[0]:
        raise NotApplicable("reports no loss to look at")
    sensitive = [name for name in alone[0] if not close(values["one document"][name], alone[0][name])]
    if not sensitive:
        raise NotApplicable("no loss tells one document from two")
    for name in sensitive:
        expected = (alone[0][name] + alone[1][name]) / 2
        if not close(values["packed"][name], expected):
            raise Failed(f"{name} of a pack of two documents is {_number(values['packed'][name])}; alone {_number(expected)}")
    return f"{', '.join(sensitive)}: a pack is worth the mean of its documents"


def padded_batch() -> tuple[Tensor, Tensor]:
    """(24, E) rows of which 8, scattered, are padding with numbers of their own; and the mask, True = real."""
    real = torch.ones(24, dtype=torch.bool)
    real[[0, 1, 5, 10, 11, 12, 20, 23]] = False
    return torch.where(real[:, None], batch(24), batch(24, seed=1).flip(1)), real


def _outcome(subject: Subject, x: Tensor, mask: Tensor | None = None, real: Tensor | None = None) -> Outcome:
    """Everything that one training microbatch and its step leave behind; the main loss is the mean over `real` rows."""
    router = subject.build()
    gate = subject.adapter.gate(router)
    leaf = x.clone().requires_grad_()
    decision = subject.route(router, leaf, mask=mask) if mask is not None else subject.route(router, leaf)
    per_token = (decision.weights * torch.linspace(0.5, 1, TOP_K)).sum(dim=1)
    loss = per_token.mean() if real is None else per_token[real].mean()
    subject.adapter.backward(router, loss)
    outcome = {}
    if decision.counts is not None:
        outcome["counts"] = decision.counts.clone()
    before = subject.state(router)
    report: StepReport = subject.try_step(router)
    after = subject.state(router)
    if differing(after, subject.state(subject.build())) is not None or differing(after, before) is not None:
        outcome |= {f"state {name}": value for name, value in (before | after).items()}
    outcome |= {f"loss {name}": value for name, value in report.losses.items()}
    if report.counts is not None:
        outcome["reported counts"] = report.counts[0]
    gradient = leaf.grad if gate is None else gate.grad
    if gradient is not None:
        outcome["gradient"] = gradient if gate is not None or real is None else gradient[real]
    return outcome


def _first_difference(found: Outcome, expected: Outcome) -> str | None:
    return differing(found, expected, exact=False)


def _number(value: Tensor) -> str:
    return f"{float(value.double().mean()):.4g}"
