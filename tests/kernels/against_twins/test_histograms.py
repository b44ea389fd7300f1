"""Histogram kernels equal their definitions to the bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenload import Router, balance_step
from evenload.kernels import bf16_key, canonical, histogram, margin, ops, radix

INF = float("inf")
EVERY_BF16 = torch.arange(-32768, 32768, dtype=torch.int32, device="cpu").to(torch.int16).view(torch.bfloat16)
EVERY_NUMBER = EVERY_BF16[~EVERY_BF16.isnan()]
SHAPES = [(0, 3), (1, 1), (1000, 3), (300, 17), (40, 97)]


def sample(rows, columns):
    values = EVERY_NUMBER[torch.randint(len(EVERY_NUMBER), (rows, columns), device="cpu")]
    values[: rows // 4] = torch.tensor([-3.0, 0.0, 2.5], dtype=torch.bfloat16, device="cpu")[torch.arange(columns) % 3]
    return canonical(values).to(torch.get_default_device())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bytes(shape):
    values = sample(*shape)
    high = ops.byte_histogram(values, None)
    assert torch.equal(high, radix.high_byte_histogram(values))
    assert high.sum() == values.numel()
    assert high.dtype == torch.int32
    bins = [torch.zeros(shape[1], dtype=torch.int64), torch.full((shape[1],), 127), torch.full((shape[1],), 191)]
    if shape[0]:
        bins.append(bf16_key(values[-1]).long() >> 8)
    for high_E in bins:
        low = ops.byte_histogram(values, high_E)
        assert torch.equal(low, radix.low_byte_histogram(values, high_E))
        assert torch.equal(low.sum(dim=1), high.gather(1, high_E[:, None])[:, 0])


def test_columns_that_are_not_contiguous():
    values = sample(60, 8)[:, ::2]
    assert torch.equal(ops.byte_histogram(values, None), radix.high_byte_histogram(values))


def test_every_bf16_number_once():
    values = canonical(EVERY_NUMBER).to(torch.get_default_device())[:, None]
    assert torch.equal(ops.byte_histogram(values, None), radix.high_byte_histogram(values))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_margins(shape, limited, masked):
    selection, cutoff = torch.randn(shape), torch.randn(shape[0])
    selection[::3], cutoff[::3] = selection[::3].round(), cutoff[::3].round()
    selection[::5, 0] = -INF
    cutoff[::5] = -INF
    allowed = torch.rand(shape) > 0.5 if limited else None
    mask = torch.rand(shape[0]) > 0.5 if masked else None
    values, high = ops.margin_bytes(selection, cutoff, allowed, mask)
    expected, expected_high = margin.bf16_margins(selection, cutoff, allowed, mask)
    assert torch.equal(values.view(torch.int16), expected.view(torch.int16))
    assert torch.equal(bf16_key(values), bf16_key(expected))
    assert torch.equal(high, expected_high)


def test_rounding_to_bf16_is_that_of_torch():
    """Halfway cases to even, overflow to infinity, subnormals kept, one zero."""
    bits = torch.tensor([0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x7F7F7FFF, 0x00008000, 0x00018000, 0x00000001, 0])
    wicked = torch.cat([bits, bits - 2**31]).to(torch.int32).view(torch.float32)
    selection = torch.cat(
        [wicked, torch.tensor([INF, -INF]), torch.randint(-(2**31), 2**31, (4096,)).to(torch.int32).view(torch.float32)]
    )
    selection = selection[~selection.isnan()][:, None]
    cutoff = torch.zeros(len(selection))
    found, _ = ops.margin_bytes(selection, cutoff, None, None)
    expected, _ = margin.bf16_margins(selection, cutoff, None, None)
    assert torch.equal(found.view(torch.int16), expected.view(torch.int16))


@settings(max_examples=25)
@given(
    st.integers(0, 40),
    st.integers(1, 11),
    st.sampled_from([1, 2, 7, 64, 1000]),
    st.floats(-3, 3),
    st.floats(0.1, 9),
    st.booleans(),
)
def test_uniform_bins(rows, columns, bins, low, width, masked):
    values = torch.randn(rows, columns) * 4
    values[::4] = torch.tensor([INF, -INF, 0.0])[torch.arange(columns) % 3]
    mask = torch.rand(rows) > 0.5 if masked else None
    bounds = torch.tensor(low), torch.tensor(low + width)
    found = ops.uniform_histogram(values, *bounds, bins, mask)
    assert torch.equal(found, histogram.uniform_histogram(values, *bounds, bins, mask))
    assert (found.sum(dim=1) == (rows if mask is None else mask.sum())).all()


def test_uniform_bins_over_several_tiles():
    values = torch.randn(2100, 9)
    bounds = torch.tensor(-1.0), torch.tensor(1.0)
    found = ops.uniform_histogram(values, *bounds, 1000, None)
    assert torch.equal(found, histogram.uniform_histogram(values, *bounds, 1000, None))


def test_operators_hold_to_the_rules_of_torch():
    selection = torch.randn(5, 3)
    torch.library.opcheck(ops.margin_bytes, (selection, torch.randn(5), selection > 0, None))
    torch.library.opcheck(ops.byte_histogram, (selection.bfloat16(), None))
    torch.library.opcheck(ops.uniform_histogram, (selection, torch.tensor(-1.0), torch.tensor(1.0), 10, None))


@pytest.mark.parametrize("balancer", ["eqb", "qb_histogram"])
def test_the_bias_of_a_step_is_that_of_the_definition(balancer, monkeypatch):
    logits = torch.randn(2, 70, 6) + torch.arange(6.0)
    biases = []
    for wanted in (True, False):
        monkeypatch.setattr("evenload.kernels.uses_triton", lambda *_, wanted=wanted: wanted)
        router = Router(None, 6, 2, balancers=balancer)
        for microbatch in logits:
            router(microbatch, mask=torch.arange(70) < 61)
        balance_step(router)
        biases.append(router.balancers[0].bias.clone())
    assert biases[0].abs().sum() > 0
    # Scores of sigmoid differ by rounding, and a bin is only 0.003 wide; on logits there is nothing to round.
    if balancer == "eqb":
        assert torch.equal(*biases)
    else:
        torch.testing.assert_close(*biases, rtol=0, atol=1e-5)
