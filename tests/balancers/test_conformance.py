"""Rows of docs/conformance.md in more detail than the suite asks of any router: messages, exact values, further options.

What every router must show is in evenload.balancers.conformance, and test_conformance_suite.py runs it against every balancer.
"""

import copy

import pytest
import torch
from state import carried
from torch.utils.checkpoint import checkpoint

import evenload
from evenload import Router, balance_step, route


def test_02_one_mask_convention_true_is_real():
    logits = torch.randn(4, 3)
    routing = route(logits, 1, mask=torch.tensor([True, True, False, True]))
    assert routing.counts.sum() == 3
    assert routing.weights[2].tolist() == [0]
    with pytest.raises(ValueError, match=r"dtype torch.int64.*mask.bool"):
        route(logits, 1, mask=torch.ones(4, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"shape \(5,\).*leading shape is \(4,\)"):
        route(logits, 1, mask=torch.ones(5, dtype=torch.bool))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("score", ["sigmoid", "softmax", "identity"])
def test_05_counts_are_equal_under_compile(score, recompute):
    torch._dynamo.reset()
    router = Router(16, 8, 2, balancers="eqb+lei", score=score)
    compiled = copy.deepcopy(router)
    x = torch.randn(32, 16)
    outcomes = []
    for forward, owner in ((router, router), (torch.compile(compiled, fullgraph=True, backend="aot_eager"), compiled)):
        for _ in range(2):
            if recompute:
                weights = checkpoint(lambda x, forward=forward: forward(x).weights, x, use_reentrant=False)
            else:
                weights = forward(x).weights
            evenload.anchor_loss(weights.mean(), owner).mul(3).backward()
        outcomes.append((owner.counts.clone(), owner.weight.grad))
        balance_step(owner)
    assert torch.equal(outcomes[0][0], outcomes[1][0])
    torch.testing.assert_close(outcomes[0][1], outcomes[1][1])
    assert torch.equal(router.balancers[0].bias, compiled.balancers[0].bias)


@pytest.mark.parametrize("cast", [lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.bfloat16().float()])
def test_07_state_keeps_its_dtype(cast):
    router = Router(16, 8, 2, balancers="eqb+phi")
    router(torch.randn(64, 16))
    balance_step(router)
    router.balancers[0].bias.add_(1e-6)
    router.counts.fill_(40_841)  # bf16 would make this 40,960
    before = {name: tensor.clone() for name, tensor in carried(router).items()}
    router = cast(router)
    for name, tensor in carried(router).items():
        assert tensor.dtype == before[name].dtype
        assert torch.equal(tensor, before[name]), name


def test_07_the_gate_computes_in_float32():
    router = Router(16, 8, 2).to(torch.bfloat16)
    x = torch.randn(64, 16).bfloat16()
    expected = x.float() @ router.weight.float().T
    for autocast in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            routing = router(x)
        assert routing.logits.dtype == routing.weights.dtype == torch.float32
        torch.testing.assert_close(routing.logits, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", sorted(evenload.BALANCERS))
def test_09_meta_construction_then_reset(name):
    torch.manual_seed(3)
    direct = Router(16, 8, 2, balancers=name)
    with torch.device("meta"):
        late = Router(16, 8, 2, balancers=name)
    late.to_empty(device="cpu")
    for tensor in carried(late).values():
        tensor.fill_(77)  # what to_empty leaves behind is garbage
    torch.manual_seed(3)
    late.reset_parameters()
    for key, expected in carried(direct).items():
        assert torch.equal(carried(late)[key], expected), key
    assert torch.equal(late.weight, direct.weight)


@pytest.mark.parametrize("score", ["sigmoid", "softmax", "identity"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_10_nan(score, poison):
    logits = torch.randn(6, 5)
    logits[4, 2] = poison
    with pytest.raises(ValueError, match=r'1 of 6 rows.*first: row 4.*nan="route"'):
        route(logits, 3, score=score)
    routing = route(logits.requires_grad_(), 3, score=score, nan="route")
    assert routing.nan_rows == 1
    assert all(len(set(row)) == 3 and min(row) >= 0 and max(row) < 5 for row in routing.indices.tolist())
    assert routing.counts.sum() == 18
    routing.weights.sum().backward()
    assert logits.grad.isfinite().all()
    assert logits.grad[4].abs().sum() == 0
    router = Router(None, 5, 3, score=score, nan="route", balancers="eqb")
    router(logits)
    assert balance_step(router).layers["nan_rows"].item() == 1
    assert router.balancers[0].bias.isfinite().all()


def test_10_nan_in_padding_is_nobodys_business():
    logits = torch.randn(3, 4)
    logits[1] = float("nan")
    routing = route(logits.requires_grad_(), 2, mask=torch.tensor([True, False, True]))
    assert routing.nan_rows == 0
    assert routing.weights.isfinite().all()
    routing.weights.sum().backward()
    assert logits.grad.isfinite().all()
    assert logits.grad[1].abs().sum() == 0


def test_11_ties_go_to_the_lowest_index():
    assert route(torch.zeros(3, 8), 3).indices.tolist() == [[0, 1, 2]] * 3
    logits = torch.tensor([[0.0, 1.0, 1.0, -0.0]])
    assert route(logits, 3).indices.tolist() == [[1, 2, 0]]


def test_17_ruled_out_groups_are_minus_infinity_not_zero():
    """All biased values negative: a 0 for the ruled-out experts would win."""
    logits = torch.tensor([[1.0, 1.1, 0.2, 0.1, 0.3, 0.0]]) - 5
    routing = route(logits, 2, bias=torch.full((6,), -10.0), score="identity", num_groups=3, group_top_k=1)
    assert routing.indices.tolist() == [[1, 0]]
    assert routing.cutoff.item() == float("-inf")


@pytest.mark.parametrize("scope", ["microbatch", "sequence", "global"])
@pytest.mark.parametrize("score", ["sigmoid", "softmax", "identity"])
@pytest.mark.parametrize("top_k", [1, 2])
def test_21_the_value_at_perfect_balance(top_k, score, scope):
    """gshard: its coefficient, whatever K; lei, phi: 0; z_loss: coefficient times (log E)^2 at zero logits."""
    experts = 4
    specs = [{"name": "gshard", "coeff": 0.25, "scope": scope}, "lei", "phi", {"name": "z_loss", "coeff": 0.25}, "uniform"]
    router = Router(None, experts, top_k, balancers=specs, score=score)
    router(torch.zeros(8, experts) if score != "sigmoid" else torch.full((8, experts), 0.3))
    losses = balance_step(router).losses
    assert losses["gshard"].item() == pytest.approx(0.25)
    assert losses["lei"].item() == pytest.approx(0, abs=1e-12)
    assert losses["phi"].item() == pytest.approx(0, abs=1e-7)
    if score != "sigmoid":
        assert losses["z_loss"].item() == pytest.approx(0.25 * torch.tensor(4.0).log().square().item())


@pytest.mark.parametrize("name", sorted(evenload.BALANCERS))
@pytest.mark.parametrize(("experts", "top_k", "rows"), [(4, 4, 6), (5, 1, 7), (7, 3, 1), (8, 2, 1), (1, 1, 3), (64, 1, 2)])
def test_23_odd_sizes_have_defined_results(name, experts, top_k, rows):
    """K = E, K = 1, E that is no power of two, T = 1, T K < E, E = 1."""
    router = Router(8, experts, top_k, balancers=name)
    for _ in range(3):
        routing = router(torch.randn(rows, 8))
        routing.weights.sum().backward()
        assert routing.counts.sum() == rows * top_k
        report = balance_step(router)
    assert all(tensor.isfinite().all() for tensor in carried(router).values())
    assert router.weight.grad.isfinite().all()
    if experts == top_k:
        assert report.layers["maxvio"].item() == 0
        assert all(buffer.abs().sum() == 0 for key, buffer in router.state_dict().items() if key.endswith("bias"))


def test_25_histogram_on_raw_logits_is_refused():
    for score in ("softmax", "identity"):
        with pytest.raises(ValueError, match=r'qb_histogram|HistogramQuantile.*score="sigmoid".*ExactQuantile'):
            Router(8, 4, 2, balancers="qb_histogram", score=score)
