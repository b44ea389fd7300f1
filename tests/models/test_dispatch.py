import pytest
import torch

from evenload.models import LocalDispatcher

# Four tokens, top-2 of three experts.
INDICES = torch.tensor([[2, 0], [0, 1], [2, 1], [0, 2]])
X = torch.tensor([[10.0], [11.0], [12.0], [13.0]])


def test_rows_are_expert_major_and_keep_token_order() -> None:
    rows, counts, plan = LocalDispatcher(3).dispatch(X, INDICES)
    assert rows[:, 0].tolist() == [10, 11, 13, 11, 12, 10, 12, 13]
    assert counts.tolist() == [3, 2, 3]
    assert plan.slots.tolist() == [1, 2, 6, 3, 5, 0, 4, 7]


def test_combine_undoes_dispatch() -> None:
    dispatcher = LocalDispatcher(3)
    rows, _, plan = dispatcher.dispatch(X, INDICES)
    weights = torch.tensor([[0.25, 0.75], [1.0, 0.0], [2.0, 1.0], [0.0, 0.0]])
    assert dispatcher.combine(rows, weights, plan)[:, 0].tolist() == [10.0, 11.0, 36.0, 0.0]


def test_padding_gets_no_row_and_zero_output() -> None:
    dispatcher = LocalDispatcher(3)
    x = X.clone()
    x[1] = float("nan")
    rows, counts, plan = dispatcher.dispatch(x, INDICES, torch.tensor([True, False, True, True]))
    assert rows[:, 0].tolist() == [10, 13, 12, 10, 12, 13]
    assert counts.tolist() == [2, 1, 3]
    assert dispatcher.combine(rows, torch.ones(4, 2), plan)[:, 0].tolist() == [20.0, 0.0, 24.0, 26.0]
    assert int(plan.dropped) == 0


@pytest.mark.parametrize("mask", [None, torch.tensor([True, False, True, True])])
@pytest.mark.parametrize("capacity_factor", [None, 0.5])
def test_gradients(mask: torch.Tensor | None, capacity_factor: float | None) -> None:
    dispatcher = LocalDispatcher(3, capacity_factor)
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)

    def there_and_back(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        rows, _, plan = dispatcher.dispatch(x, INDICES, mask)
        return dispatcher.combine(rows.square(), weights, plan)

    assert torch.autograd.gradcheck(there_and_back, (x, weights))


def test_capacity_drops_the_last_tokens_and_counts_them() -> None:
    # ceil(0.7 * 4 * 2 / 3) = 2 rows per expert: token 3 does not fit into experts 0 and 2.
    rows, counts, plan = LocalDispatcher(3, 0.7).dispatch(X, INDICES)
    assert rows[:, 0].tolist() == [10, 11, 11, 12, 10, 12]
    assert counts.tolist() == [2, 2, 2]
    assert int(plan.dropped) == 2
    assert plan.dropped.dtype == torch.int64


def test_capacity_counts_real_tokens() -> None:
    dispatcher = LocalDispatcher(3, 0.5)
    # Two real tokens: ceil(0.5 * 2 * 2 / 3) = 1 row per expert. Padding takes no place, though it comes first.
    rows, counts, plan = dispatcher.dispatch(X, INDICES, torch.tensor([False, False, True, True]))
    assert rows[:, 0].tolist() == [13, 12, 12]
    assert counts.tolist() == [1, 1, 1]
    assert int(plan.dropped) == 1


@pytest.mark.parametrize(
    ("factor", "tokens", "top_k", "expected"),
    [
        (None, 10, 2, 10),
        (1.0, 10, 2, 5),
        (1.1, 10, 4, 10),
        (1.1, 100, 2, 55),
        (1.01, 40, 1, 11),
        (100.0, 10, 2, 10),
        (1.0, 0, 2, 0),
    ],
)
def test_capacity_is_rounded_up_and_clamped(factor: float | None, tokens: int, top_k: int, expected: int) -> None:
    assert LocalDispatcher(4, factor).capacity(tokens, top_k) == expected


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan")])
def test_capacity_is_validated(factor: float) -> None:
    with pytest.raises(ValueError, match="capacity_factor="):
        LocalDispatcher(4, factor)


@pytest.mark.parametrize("capacity_factor", [None, 1.0])
@pytest.mark.parametrize("mask", [None, torch.zeros(4, dtype=torch.bool)])
def test_no_tokens(capacity_factor: float | None, mask: torch.Tensor | None) -> None:
    dispatcher = LocalDispatcher(3, capacity_factor)
    x = (X if mask is not None else X[:0]).clone().requires_grad_()
    rows, counts, plan = dispatcher.dispatch(x, INDICES[: len(x)], mask)
    assert rows.shape == (0, 1)
    assert counts.tolist() == [0, 0, 0]
    out = dispatcher.combine(rows, torch.ones(len(x), 2), plan)
    out.sum().backward()
    assert out.shape == x.shape
    assert x.grad is not None
    assert not x.grad.any()


def test_combine_weighs_and_sums_in_float32() -> None:
    dispatcher = LocalDispatcher(4)
    rows, _, plan = dispatcher.dispatch(torch.ones(2, 1, dtype=torch.bfloat16), torch.tensor([[0, 1, 2, 3]] * 2))
    # In bfloat16, 256 + 0.75 stays 256 three times, and 257 is no number at all.
    out = dispatcher.combine(rows, torch.tensor([[256.0, 0.75, 0.75, 0.75], [257.0, -256.0, 0.0, 0.0]]), plan)
    assert out.dtype == torch.bfloat16
    assert out[:, 0].tolist() == [258.0, 1.0]
