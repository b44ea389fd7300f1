"""What goes wrong with routers in the field, row by row (the numbers are those of docs/conformance.md), and the right value.

Rows proven elsewhere: 1 padding, 4 eval, 5 recomputation, 6 accumulation and ranks, 8 save and load, 12 empty ranks in
test_invariances.py; 13 empty experts and 14 capacity in tests/models; 24 the sign in test_quantiles.py.
"""

import copy
import warnings

import pytest
import torch
from state import carried
from torch.utils.checkpoint import checkpoint

import evenload
from evenload import GShardLoss, Router, balance_step, route


def test_02_one_mask_convention_true_is_real():
    logits = torch.randn(4, 3)
    routing = route(logits, 1, mask=torch.tensor([True, True, False, True]))
    assert routing.counts.sum() == 3
    assert routing.weights[2].tolist() == [0]
    with pytest.raises(ValueError, match=r"dtype torch.int64.*mask.bool"):
        route(logits, 1, mask=torch.ones(4, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"shape \(5,\).*leading shape is \(4,\)"):
        route(logits, 1, mask=torch.ones(5, dtype=torch.bool))


def test_03_logits_are_raw_and_the_loss_softmaxes_once():
    logits = torch.randn(4, 3)
    for score in ("sigmoid", "softmax"):
        router = Router(None, 3, 1, score=score)
        assert torch.equal(router(logits).logits, logits)


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


def test_08_updates_are_in_place_and_missing_state_raises():
    router = Router(16, 8, 2, balancers="eqb+phi")
    pointers = {name: tensor.data_ptr() for name, tensor in carried(router).items()}
    router(torch.randn(64, 16))
    balance_step(router)
    assert {name: tensor.data_ptr() for name, tensor in carried(router).items()} == pointers
    state = router.state_dict()
    assert state["balancers.eqb.bias"].abs().sum() > 0
    del state["balancers.eqb.bias"]
    with pytest.raises(RuntimeError, match="bias"):
        router.load_state_dict(state)


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


def test_12_no_tokens_at_all():
    for name in evenload.BALANCERS:
        router = Router(16, 8, 2, balancers=name)
        x = torch.zeros(0, 16, requires_grad=True)
        routing = router(x)
        assert routing.indices.shape == (0, 2)
        routing.weights.sum().backward()
        assert x.grad.shape == (0, 16)
        assert torch.equal(router.weight.grad, torch.zeros(8, 16))
        balance_step(router)
        assert all(tensor.isfinite().all() for tensor in carried(router).values())


def test_15_no_graph_break():
    for name in evenload.BALANCERS:
        torch._dynamo.reset()
        compiled = torch.compile(Router(16, 8, 2, balancers=name), fullgraph=True, backend="eager")
        compiled(torch.randn(32, 16)).weights.sum().backward()


def test_16_packed_sequences_count_per_document():
    """Two documents, each balanced in itself or not: the pack as a whole looks balanced either way."""
    lopsided = torch.tensor([0, 0, 1, 1]) * 1
    router = Router(None, 2, 1, balancers=[GShardLoss(1.0, "sequence")], score="softmax")
    logits = torch.nn.functional.one_hot(lopsided, 2).float() * 50
    values = []
    for ids in (torch.zeros(4), torch.tensor([7, 7, 3, 3])):
        router(logits, document_ids=ids)
        values.append(balance_step(router).losses["gshard"].item())
    assert values == pytest.approx([1.0, 2.0])


def test_17_ruled_out_groups_are_minus_infinity_not_zero():
    """All biased values negative: a 0 for the ruled-out experts would win."""
    logits = torch.tensor([[1.0, 1.1, 0.2, 0.1, 0.3, 0.0]]) - 5
    routing = route(logits, 2, bias=torch.full((6,), -10.0), score="identity", num_groups=3, group_top_k=1)
    assert routing.indices.tolist() == [[1, 0]]
    assert routing.cutoff.item() == float("-inf")


def test_18_losses_are_per_layer():
    """Two layers that collapse in opposite directions: pooled over layers they would look balanced."""
    model = torch.nn.ModuleList(Router(None, 2, 1, balancers=[GShardLoss(1.0)], score="softmax") for _ in range(2))
    for router, favourite in zip(model, (0, 1), strict=True):
        router(torch.nn.functional.one_hot(torch.full((8,), favourite), 2).float() * 50)
    report = balance_step(model)
    assert report.losses["gshard"].tolist() == pytest.approx([2.0, 2.0])
    assert report.layers["maxvio"].tolist() == [1.0, 1.0]


def test_19_counts_are_integers_and_keys_do_not_grow_with_the_model():
    reports = []
    for layers in (1, 9):
        model = torch.nn.ModuleList(Router(None, 4, 2, balancers="eqb+lei+gshard") for _ in range(layers))
        for router in model:
            router(torch.randn(8, 4))
        reports.append(balance_step(model))
    assert reports[0].layers.keys() == reports[1].layers.keys()
    assert reports[0].losses.keys() == reports[1].losses.keys() == {"lei", "gshard"}
    assert all(counts.dtype == torch.int64 for counts in reports[1].counts)
    assert all(value.shape == (9,) for value in [*reports[1].layers.values(), *reports[1].losses.values()])


def training_run(router, steps, balance):
    optimizer = torch.optim.SGD(router.parameters(), lr=0.1)
    for _ in range(steps):
        for _ in range(2):
            router(torch.randn(8, 4)).weights.sum().backward()
        if balance:
            balance_step(router)
        optimizer.step()
        optimizer.zero_grad()


def test_20_a_run_that_never_balances_warns_once():
    with pytest.warns(UserWarning, match=r"eqb.*Call evenload.balance_step\(model\) once per") as caught:
        training_run(Router(4, 4, 2, balancers="eqb"), 12, balance=False)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        training_run(Router(4, 4, 2, balancers="eqb"), 12, balance=True)
        training_run(Router(4, 4, 2), 12, balance=False)  # nothing to balance


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


def test_22_no_module_level_state():
    """Two models that train side by side do not see each other."""
    alone, beside, other = (Router(None, 4, 2, balancers="eqb+lei+gshard") for _ in range(3))
    x = torch.randn(16, 4)
    alone(x)
    other(torch.randn(16, 4) + torch.arange(4))
    beside(x)
    expected, found = balance_step(alone), balance_step(beside)
    assert torch.equal(alone.balancers[0].bias, beside.balancers[0].bias)
    assert torch.equal(expected.losses["gshard"], found.losses["gshard"])
    assert balance_step(other).layers["tokens"].item() == 16


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


def tensor_parallel_step(rank, group, parts):
    """Ranks 0, 1 and ranks 2, 3 see the same tokens: sum over ranks with distinct tokens only."""
    from torch import distributed as dist

    distinct = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    router = Router(None, 6, 2, balancers="eqb")
    router(parts[rank // 2])
    report = balance_step(router, distinct)
    return router.balancers[0].bias, report.layers["tokens"].item()


def test_26_replicated_tokens_are_not_summed_twice(ranks):
    parts = list(torch.randn(20, 6).split([9, 11]))
    router = Router(None, 6, 2, balancers="eqb")
    router(torch.cat(parts))
    balance_step(router)
    for bias, tokens in ranks.run(4, tensor_parallel_step, parts):
        assert torch.equal(bias, router.balancers[0].bias)
        assert tokens == 20
