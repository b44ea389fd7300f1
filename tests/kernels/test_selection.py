import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evenload.kernels import expert_counts, top_k, uniform_histogram

FEW_VALUES = [0.0, -0.0, 1.0, 1.0, -1.0, float("-inf"), 2.5]  # many ties on purpose


@st.composite
def matrices(draw):
    rows, columns = draw(st.integers(0, 6)), draw(st.integers(1, 9))
    cells = draw(st.lists(st.sampled_from(FEW_VALUES), min_size=rows * columns, max_size=rows * columns))
    return torch.tensor(cells, dtype=torch.float32).view(rows, columns), draw(st.integers(1, columns))


@given(matrices())
def test_top_k_is_the_sort_by_value_then_lowest_index(case):
    values, k = case
    indices, cutoff = top_k(values, k)
    for row, chosen, runner_up in zip(values.tolist(), indices.tolist(), cutoff.tolist(), strict=True):
        order = sorted(range(len(row)), key=lambda e, row=row: (-row[e], e))
        assert chosen == order[:k]
        assert runner_up == (row[order[k]] if k < len(row) else float("-inf"))
    assert not cutoff[cutoff == 0].signbit().any()


def test_float64_chooses_as_float32_does():
    values = torch.tensor([[-0.0, 0.0, -1.0, 0.0], [float("-inf"), -2.0, -2.0, 3.0]])
    for k in (1, 2, 3, 4):
        for found, expected in zip(top_k(values.double(), k), top_k(values, k), strict=True):
            assert torch.equal(found.to(expected.dtype), expected)


def test_all_equal_values_give_the_first_experts():
    assert top_k(torch.zeros(2, 5), 3)[0].tolist() == [[0, 1, 2]] * 2


def test_counts_leave_out_masked_rows():
    indices = torch.tensor([[0, 1], [1, 2], [0, 2]])
    assert expert_counts(indices, 4).tolist() == [2, 2, 2, 0]
    assert expert_counts(indices, 4, torch.tensor([True, False, True])).tolist() == [2, 1, 1, 0]
    assert expert_counts(indices, 4).dtype == torch.int64


@pytest.mark.parametrize("masked", [False, True])
def test_uniform_histogram_counts_every_real_row_once(masked):
    values = torch.tensor([[-9.0, 0.0], [0.49, 0.5], [0.51, 9.0]])
    mask = torch.tensor([True, True, False]) if masked else None
    counts = uniform_histogram(values, torch.tensor(0.0), torch.tensor(1.0), 2, mask)
    assert counts.tolist() == ([[2, 0], [1, 1]] if masked else [[2, 1], [1, 2]])
