"""Rows 10, 11, 17, 23, 24, 25: which experts are chosen, and where the bias drives the choice.

Shape suffixes: T tokens, E experts, K experts per token.
"""

import torch
from torch import Tensor, nn

from .adapter import NotApplicable
from .subject import Failed, Subject, batch, chosen_counts, one_line

# Four tokens, two experts each: loads (4, 4, 0, 0) before, bias (-1, -1, 1, 1) after one exact step, loads (2, 2, 2, 2) then.
FOUR_TOKENS = torch.tensor([[2, 0.5, -2, -1], [2, 3, 0.5, -1], [0, 2, -0.5, -1], [2, 0, -1.5, -1]])


def nan_rows(subject: Subject) -> str:
    """Row 10."""
    experts, top_k = 8, 3
    x = batch(6, experts)
    x[4] = float("nan")
    router = subject.build(experts, top_k)
    try:
        decision = subject.route(router, x)
    except Exception as error:
        if "nan" in str(error).lower():
            return f"refused: {_first_clause(error)}"
        raise Failed(f"a NaN row ends in {one_line(error)}, which does not say what is wrong") from error
    ids = decision.indices[4].tolist()
    if len(set(ids)) < top_k or min(ids) < 0 or max(ids) >= experts:
        raise Failed(f"a NaN row is sent to experts {ids} of {experts}")
    if not decision.weights.isfinite().all():
        raise Failed(f"a NaN row passes without an error: experts {ids} with weights {decision.weights[4].tolist()}, uncounted")
    counted = subject.try_step(router).nan_rows
    if counted != 1:
        raise Failed(f"a NaN row is routed to {ids} and counted {counted or 0} times")
    return f"routed to {top_k} distinct experts and counted"


def ties(subject: Subject) -> str:
    """Row 11."""
    _require_scores(subject)
    for experts, top_k, rows in ((8, 3, 4), (64, 2, 16), (128, 6, 4), (256, 8, 64)):
        router = subject.build(experts, top_k).eval()
        for row, expected in (
            (torch.zeros(experts), list(range(top_k))),
            (torch.zeros(experts).index_fill(0, torch.arange(1, experts), 1.0), list(range(1, top_k + 1))),
        ):
            found = subject.route(router, row.expand(rows, experts)).indices.sort(dim=1).values
            wrong = (found != torch.tensor(expected)).any(dim=1)
            if wrong.any():
                ids = found[int(wrong.int().argmax())].tolist()
                raise Failed(f"of {experts} experts, those tied in first place start at {expected[0]}; it chose {ids}")
    return "the lowest index wins, up to 256 experts"


def groups(subject: Subject) -> str:
    """Row 17. Every biased value is negative: a 0 for the experts outside the chosen groups would win."""
    _require_scores(subject)
    if not subject.adapter.has_groups:
        raise NotApplicable("has no group-limited routing")
    router = subject.build(8, 2, num_groups=4, group_top_k=2).eval()
    bias = subject.adapter.bias(router)
    if bias is not None:
        with torch.no_grad():
            bias.fill_(-10.0)
    row = torch.tensor([1.0, 1.1, 0.2, 0.1, 0.9, 0.95, -0.3, -0.4]) - 5  # groups 0 and 2 win, with experts 1 and 0
    found = sorted(subject.route(router, row.expand(3, 8)).indices[0].tolist())
    if found != [0, 1]:
        raise Failed(f"with every biased value below 0 it chose experts {found}; the best of the two best groups are [0, 1]")
    return "experts outside the chosen groups are never taken"


def odd_sizes(subject: Subject) -> str:
    """Row 23. K = E, K = 1, E that is no power of two, T = 1, T K < E."""
    for experts, top_k, rows in ((4, 4, 6), (5, 1, 7), (7, 3, 1), (8, 2, 1), (64, 1, 2), (6, 6, 1)):
        where = f"E={experts}, K={top_k}, T={rows}"
        router = subject.build(experts, top_k)
        for seed in range(3):
            try:
                x = batch(rows, experts, seed=seed).requires_grad_()
                decision = subject.route(router, x)
                subject.adapter.backward(router, decision.weights.sum())
                report = subject.try_step(router)
            except (NotApplicable, Failed):
                raise
            except Exception as error:
                raise Failed(f"{where}: {one_line(error)}") from error
            ids = decision.indices
            legal = all(len(set(row)) == top_k and 0 <= min(row) <= max(row) < experts for row in ids.tolist())
            if ids.shape != (rows, top_k) or not legal:
                raise Failed(f"{where}: experts {ids.tolist()}")
            numbers = {"a weight": decision.weights, "a gradient": x.grad} | subject.state(router) | report.losses
            for name, value in numbers.items():
                if value is not None and not value.isfinite().all():
                    raise Failed(f"{where}: {name} is not finite")
    return "defined results for K = E, K = 1, E = 5 and 7, T = 1, T K < E"


def sign(subject: Subject) -> str:
    """Row 24."""
    _require_scores(subject)
    router = subject.build()
    bias = subject.adapter.bias(router)
    if bias is None:
        raise NotApplicable("has no selection bias")
    with torch.no_grad():
        bias.zero_()
        bias[7] = 50.0
    preferred = subject.route(router.eval(), batch(24)).indices
    if not (preferred == 7).any(dim=1).all():
        raise Failed("a large bias keeps tokens away from its expert: the choice does not add it")
    if not subject.adapter.updates:
        return "the bias is added; nothing updates it (row 20)"
    start, end, steps = _simulate(subject, subject.build(), spread=0.25, noise=0.5, most=200)
    if not end < 0.5 * start:
        raise Failed(f"MaxVio goes from {start:.2f} to {end:.2f} in {steps} steps on one distribution")
    if subject.adapter.estimator == "quantile":
        _four_tokens(subject)
    vector = "; the four-token vector holds" if subject.adapter.estimator == "quantile" else ""
    return f"MaxVio falls from {start:.2f} to {end:.2f} in {steps} steps{vector}"


def _four_tokens(subject: Subject) -> None:
    router = subject.build(4, 2)
    loads = chosen_counts(subject.route(router, FOUR_TOKENS).indices, 4).tolist()
    subject.step(router)
    bias = subject.adapter.bias(router)
    found = [] if bias is None else (bias - bias.mean()).tolist()
    then = chosen_counts(subject.route(router, FOUR_TOKENS).indices, 4).tolist()
    if loads != [4, 4, 0, 0] or found != [-1, -1, 1, 1] or then != [2, 2, 2, 2]:
        raise Failed(
            f"four-token vector: loads {loads}, bias {found}, then {then}; not [4, 4, 0, 0], [-1, -1, 1, 1], [2, 2, 2, 2]"
        )


def value_range(subject: Subject) -> str:
    """Row 25. Balancing on raw logits is refused, or right however far they spread."""
    _require_scores(subject)
    if not subject.adapter.estimator:
        raise NotApplicable("estimates no quantile")
    try:
        router = subject.build(8, 2, score="identity")
    except ValueError as error:
        return f"raw logits refused: {_first_clause(error)}"
    narrow_start, narrow_end, _ = _simulate(subject, router, spread=0.25, noise=0.5, most=5)
    if not narrow_end < 0.5 * narrow_start:
        raise NotApplicable("does not balance logits of a narrow range either (row 24)")
    start, end, steps = _simulate(subject, subject.build(8, 2, score="identity"), spread=20.0, noise=1.0, most=5)
    if not end < 0.5 * start:
        raise Failed(f"logits that spread over 40 are clipped: MaxVio goes from {start:.2f} to {end:.2f} in {steps} steps")
    return f"logits that spread over 40: MaxVio falls from {start:.2f} to {end:.2f} in {steps} steps"


def _simulate(subject: Subject, router: nn.Module, *, spread: float, noise: float, most: int) -> tuple[float, float, int]:
    """MaxVio of the first step, that of the last, and how many there were, on fresh tokens of one skewed distribution."""
    offsets = torch.linspace(spread, -spread, 8)
    generator = torch.Generator().manual_seed(5)
    first = last = 0.0
    for step in range(most):
        logits = offsets + noise * torch.randn(512, 8, generator=generator)
        last = _max_vio(subject.route(router.train(), logits).indices)
        first = last if step == 0 else first
        if last < 0.3 * first:
            return first, last, step
        subject.step(router)
    return first, last, most


def _max_vio(indices_TK: Tensor) -> float:
    counts = chosen_counts(indices_TK, 8).double()
    return float(counts.max() / counts.mean() - 1)


def _first_clause(error: Exception) -> str:
    return str(error).splitlines()[0].split(";")[0]


def _require_scores(subject: Subject) -> None:
    if not subject.adapter.selects_by_score:
        raise NotApplicable("chooses without looking at scores")
