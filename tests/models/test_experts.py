import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from evenload.models import Experts
from evenload.models.experts import grouped_linear, grouped_obstacle, loop_linear, zero_empty_experts

COUNTS = {
    "even": [3, 3, 3, 3],
    "uneven": [7, 1, 3, 1],
    "empty experts": [0, 9, 0, 3],
    "all in the last": [0, 0, 0, 12],
    "all in the first": [12, 0, 0, 0],
    "no rows": [0, 0, 0, 0],
}


def run(experts: Experts, rows: Tensor, counts: list[int]) -> tuple[Tensor, ...]:
    """Output and gradients of a loss in which every element has another weight."""
    experts.zero_grad()
    rows = rows.clone().requires_grad_()
    out = experts(rows, torch.tensor(counts))
    (out * torch.arange(out.numel()).view_as(out).cos()).sum().backward()
    assert rows.grad is not None
    return out.detach(), rows.grad, experts.w_gate_up.grad, experts.w_down.grad


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_grouped_equals_loop_equals_single_experts(counts: list[int]) -> None:
    loop = Experts(4, 8, 12, compute="loop", init_std=0.5)
    auto = copy.deepcopy(loop)
    auto.compute = "auto"
    rows = torch.randn(sum(counts), 8)
    expected = []
    for expert, part in enumerate(rows.split(counts)):
        gate, up = (part @ loop.w_gate_up[expert].T).chunk(2, dim=-1)
        expected.append((F.silu(gate) * up) @ loop.w_down[expert].T)
    for got in (run(loop, rows, counts), run(auto, rows, counts)):
        torch.testing.assert_close(got[0], torch.cat(expected))
    for a, b in itertools.zip_longest(run(loop, rows, counts), run(auto, rows, counts)):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("compute", ["loop", "auto"])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_experts_without_rows_get_exactly_zero_gradient(counts: list[int], compute: str) -> None:
    _, _, grad_gate_up, grad_down = run(Experts(4, 8, 12, compute=compute), torch.randn(sum(counts), 8), counts)
    for expert, count in enumerate(counts):
        for grad in (grad_gate_up[expert], grad_down[expert]):
            assert bool((grad == 0).all()) == (count == 0)


def test_unwritten_gradients_of_empty_experts_are_cleared() -> None:
    grad = torch.full((4, 2, 3), float("nan"))
    grad[1], grad[3] = 5.0, 6.0
    zero_empty_experts(grad, torch.tensor([0, 9, 9, 12], dtype=torch.int32))
    assert grad[:, 0, 0].tolist() == [0.0, 5.0, 0.0, 6.0]
    assert not grad.isnan().any()


def test_auto_uses_grouped_where_it_is_legal(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = F.grouped_mm
    monkeypatch.setattr(F, "grouped_mm", lambda *a, **k: calls.append(1) or real(*a, **k))
    run(Experts(4, 8, 12), torch.randn(12, 8), [3, 3, 3, 3])
    assert len(calls) == 6
    run(Experts(4, 8, 12, compute="loop"), torch.randn(12, 8), [3, 3, 3, 3])
    run(Experts(4, 8, 10), torch.randn(12, 8), [3, 3, 3, 3])
    assert len(calls) == 6


@pytest.mark.parametrize(
    ("rows", "weight", "reason"),
    [
        (torch.zeros(2, 8), torch.zeros(3, 4, 8), None),
        (torch.zeros(2, 8).bfloat16(), torch.zeros(3, 8, 8), None),
        (torch.zeros(2, 8).bfloat16(), torch.zeros(3, 4, 8), "16 bytes"),
        (torch.zeros(2, 8), torch.zeros(3, 6, 8), "16 bytes"),
        (torch.zeros(2, 8).double(), torch.zeros(3, 4, 8), "float64"),
        (torch.zeros(0, 8), torch.zeros(3, 4, 8), "no rows"),
    ],
)
def test_where_grouped_is_legal(rows: Tensor, weight: Tensor, reason: str | None) -> None:
    obstacle = grouped_obstacle(rows, weight)
    assert (obstacle is None) if reason is None else (reason in str(obstacle))


def test_grouped_on_demand_says_why_not() -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        Experts(4, 8, 10, compute="grouped")(torch.randn(4, 8), torch.tensor([1, 1, 1, 1]))
    with pytest.raises(ValueError, match="compute='bmm'"):
        Experts(4, 8, 12, compute="bmm")


def test_loop_gradient_in_float64() -> None:
    experts = Experts(3, 4, 5, init_std=0.5).double()
    rows = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    counts = torch.tensor([2, 0, 4])

    def call(rows: Tensor, *_: Tensor) -> Tensor:
        return experts(rows, counts)

    assert torch.autograd.gradcheck(call, (rows, experts.w_gate_up, experts.w_down))


def test_grouped_takes_gradients_of_any_layout() -> None:
    rows, weight = torch.randn(6, 4, requires_grad=True), torch.randn(3, 8, 4, requires_grad=True)
    grouped = grouped_linear(rows, weight, torch.tensor([2, 2, 6], dtype=torch.int32))
    loop = loop_linear(rows, weight, [2, 0, 4])
    for grad in (torch.ones(()).expand(6, 8), torch.randn(8, 6).T, torch.randn(6, 16)[:, ::2]):
        for a, b in zip(
            torch.autograd.grad(grouped, (rows, weight), grad, retain_graph=True),
            torch.autograd.grad(loop, (rows, weight), grad, retain_graph=True),
            strict=True,
        ):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("compute", ["auto", "loop"])
def test_autocast_computes_in_bfloat16(compute: str) -> None:
    experts = Experts(4, 8, 16, compute=compute)
    rows, counts = torch.randn(12, 8), torch.tensor([3, 0, 6, 3])
    with torch.autocast("cpu", torch.bfloat16):
        out = experts(rows, counts)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), experts(rows, counts), rtol=0.05, atol=1e-4)
    out.sum().backward()
    assert experts.w_down.grad.dtype == torch.float32
