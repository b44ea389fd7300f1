"""Rows 3, 18, 19, 21: what losses and metrics say.

Shape suffixes: E experts, K experts per token.
"""

import torch
from torch import Tensor

from .adapter import Adapter, NotApplicable, prepared
from .processes import WORLD
from .subject import Failed, Subject, balanced_choice, batch, certain, chosen_counts, close, collapsed_choice


def double_softmax(subject: Subject) -> str:
    """Row 3. Raw logits out; and a loss of probabilities sees the full distance between balance and collapse."""
    x = batch(24)
    logits = subject.route(subject.build(), x).logits
    if logits is not None and not close(logits, x):
        rows = logits.double()
        normalised = bool((rows >= 0).all()) and close(rows.sum(dim=-1), torch.ones(len(rows)))
        raise Failed(f"what it returns as logits {'are probabilities' if normalised else 'are not x W^T'}")
    experts, top_k = 8, 2
    balanced, collapsed = (
        _losses_of(subject, choice, experts, top_k)
        for choice in (balanced_choice(experts, top_k), collapsed_choice(experts, top_k))
    )
    checked = []
    for name, at_balance in balanced.items():
        ratio = float(collapsed.get(name, at_balance).double().mean() / at_balance.double().mean())
        # A loss that is 0 at balance, or that does not measure balance, has no such ratio.
        if abs(float(at_balance.double().mean())) < 1e-6 or abs(ratio - 1) < 1e-6:
            continue
        if abs(ratio - experts / top_k) > 0.01 * experts / top_k:
            raise Failed(f"{name} grows {ratio:.3g}-fold from balance to collapse, not E/K = {experts / top_k:g}-fold")
        checked.append(name)
    if logits is None and not checked:
        raise NotApplicable("returns no logits and reports no loss of probabilities")
    parts = ["logits are raw"] * (logits is not None) + [f"{', '.join(checked)} softmaxes once"] * bool(checked)
    return "; ".join(parts)


def pooling(subject: Subject) -> str:
    """Row 18. Two layers that collapse onto different experts must look as bad as two that collapse onto the same."""
    same, opposite, measuring = {}, {}, []
    for steps in (1, 2):  # some losses look at the steps before
        same, opposite, balanced = (_layer_losses(subject, firsts, steps) for firsts in ((0, 0), (0, 2), None))
        if not same:
            raise NotApplicable("reports no loss")
        measuring = [name for name in same if not close(same[name].double().mean(), balanced[name].double().mean())]
        if measuring:
            break
    else:
        raise NotApplicable("no loss here measures balance")
    for name in measuring:
        one, other = (float(losses[name].double().mean()) for losses in (same, opposite))
        if abs(one - other) > 1e-4 * abs(one):
            raise Failed(f"two layers that collapse onto different experts show {name} {other:.4g}; each alone {one:.4g}")
    return f"{', '.join(measuring)} per layer"


def _layer_losses(subject: Subject, firsts: tuple[int, int] | None, steps: int) -> dict[str, Tensor]:
    """Losses of a model of two layers, whose tokens all want two of four experts from `firsts` on; None = balanced."""
    model = torch.nn.ModuleList(subject.build(4, 2) for _ in range(2))
    losses: dict[str, Tensor] = {}
    for _ in range(steps):
        for layer, first in zip(model, firsts or (0, 0), strict=True):
            subject.route(layer, certain(balanced_choice(4, 2) if firsts is None else collapsed_choice(4, 2, first), 4))
        losses = subject.step(model).losses
    return losses


def metrics(subject: Subject) -> str:
    """Row 19. Reported counts are integers, summed over ranks; the number of keys does not grow with the model."""
    keys = []
    for layers, experts in ((1, 8), (4, 8), (1, 16)):
        model = torch.nn.ModuleList(subject.build(experts) for _ in range(layers))
        for layer in model:
            subject.route(layer, batch(24, experts))
        report = subject.step(model)
        keys.append(len(report.keys))
    if report.counts is None:
        raise NotApplicable("reports no counts")
    if report.counts[0].is_floating_point():
        raise Failed(f"counts are {report.counts[0].dtype}, which rounds them")
    if len(set(keys)) > 1:
        raise Failed(f"{keys[0]} keys with 1 layer of 8 experts, {keys[1]} with 4 layers, {keys[2]} with 16 experts")
    answers = subject.pool.run(_reported_counts, subject.adapter, [(part,) for part in batch(24).split([6, 10, 1, 7])])
    totals = sorted({int(counts.sum()) for counts in answers})
    if totals != [24 * 2]:
        raise Failed(f"counts called global add up to {totals} on {WORLD} ranks; all ranks together hold {24 * 2} assignments")
    return f"integer counts over {WORLD} ranks; {keys[0]} keys whatever the model's size"


def _reported_counts(adapter: Adapter, rank: int, distinct: object, part: Tensor) -> Tensor:
    router = prepared(adapter, 8, 2)
    adapter.route(router, part)
    counts = adapter.step(router).counts
    if counts is None:
        raise NotApplicable("reports no counts")
    return counts[0]


def perfect_balance(subject: Subject) -> str:
    """Row 21. Every loss has its documented value at perfect balance, whatever K is."""
    shown = {}
    for top_k in (1, 2, 4):
        choice = balanced_choice(8, top_k)
        router = subject.build(8, top_k)
        logits = certain(choice, 8)
        indices = subject.route(router, logits).indices
        losses = subject.step(router).losses
        if not losses:
            raise NotApplicable("reports no loss")
        if chosen_counts(indices, 8).unique().numel() > 1:
            raise Failed("tokens that are sure of a balanced choice are not given it")
        stated = subject.adapter.stated_losses(logits, top_k)
        for name, value in losses.items():
            found = float(value.double().mean())
            if name not in stated:
                raise Failed(f"{name} states no value at perfect balance; it is {found:.4g} at K={top_k}")
            if abs(found - stated[name]) > 1e-4 * max(1.0, abs(stated[name])):
                where = f"at perfect balance with K={top_k}"
                raise Failed(f"{name} is {found:.4g} {where}; {subject.adapter.stated_in} says {stated[name]:.4g}")
            shown[name] = stated[name]
    return ", ".join(f"{name} = {value:.4g}" for name, value in shown.items()) + " at K = 1, 2, 4"


def _losses_of(subject: Subject, choice: Tensor, experts: int, top_k: int) -> dict[str, Tensor]:
    """Losses of tokens that are sure of these experts; none where the router overrules them."""
    router = subject.build(experts, top_k)
    decision = subject.route(router, certain(choice, experts))
    losses = subject.try_step(router).losses
    followed = torch.equal(chosen_counts(decision.indices, experts), chosen_counts(choice, experts))
    return losses if followed else {}
