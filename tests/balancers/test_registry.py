import pytest
import torch

import evenload
from evenload import (
    BALANCERS,
    ExactQuantile,
    GShardLoss,
    HistogramQuantile,
    LoadErrorInjection,
    LossFree,
    PhiBalancing,
    Router,
    ShardQuantile,
    Sinkhorn,
    ZLoss,
    make_balancers,
    route,
)

NAMES = ["gshard", "loss_free", "qb", "qb_histogram", "eqb", "lei", "phi", "z_loss", "sinkhorn", "uniform"]


def test_names():
    assert sorted(BALANCERS) == sorted(NAMES)
    for nothing in ("none", None, (), [], ["none"], [{"name": "none"}]):
        assert make_balancers(nothing) == []


def test_every_spelling():
    specs = [
        "eqb+lei",
        ["eqb", "lei"],
        [{"name": "eqb"}, {"name": "lei", "coeff": 0.03}],
        [ExactQuantile, LoadErrorInjection],
        [ExactQuantile(), LoadErrorInjection()],
        ("eqb", LoadErrorInjection),
    ]
    for spec in specs:
        assert [type(b) for b in make_balancers(spec)] == [ExactQuantile, LoadErrorInjection]
    assert make_balancers([{"name": "lei", "coeff": 0.5, "tau": 2.0}])[0].coeff == 0.5
    assert make_balancers({"name": "phi", "potential": ["lp", 3]})[0].q == 3
    assert isinstance(make_balancers("gshard")[0], GShardLoss)


@pytest.mark.parametrize(
    ("build", "complaint"),
    [
        (lambda: make_balancers("eqp"), r"unknown balancer 'eqp'; did you mean 'eqb'\? known: none, gshard"),
        (lambda: make_balancers([{"name": "lei", "coef": 1}]), r"'lei' has no option 'coef'; it takes coeff, tau"),
        (lambda: make_balancers([{"coeff": 1}]), "give a name"),
        (lambda: make_balancers("lei+lei"), "listed 2 times"),
        (lambda: Router(8, 4, 2, balancers="eqb+loss_free"), "eqb and loss_free both set the selection bias"),
        (lambda: Router(8, 4, 5), "top_k=5 with num_experts=4"),
        (lambda: Router(8, 4, 0), "top_k=0"),
        (lambda: Router(8, 0, 1), "num_experts=0"),
        (lambda: Router(8, 4, 2, score="tanh"), "score='tanh'; choose one of 'sigmoid'"),
        (lambda: Router(8, 4, 2, nan="ignore"), "nan='ignore'"),
        (lambda: Router(8, 4, 2, num_groups=3, group_top_k=1), "num_groups=3 does not divide num_experts=4"),
        (lambda: Router(8, 4, 2, num_groups=2), "give both or neither"),
        (lambda: Router(8, 4, 2, num_groups=2, group_top_k=3), "group_top_k=3 with num_groups=2"),
        (lambda: Router(8, 4, 3, num_groups=2, group_top_k=1), "1 groups hold only 2 experts"),
        (lambda: Router(8, 4, 2)(torch.zeros(3, 9)), "width 9.*d_model=8"),
        (lambda: Router(None, 4, 2)(torch.zeros(3, 9)), "9 columns.*num_experts=4"),
        (lambda: Router(8, 4, 2)(torch.zeros(3, 8), document_ids=torch.zeros(4)), r"document_ids have shape \(4,\)"),
        (lambda: GShardLoss(-0.1), r"GShardLoss: coeff=-0.1; it must be a number >= 0"),
        (lambda: GShardLoss(float("nan")), "coeff=nan"),
        (lambda: GShardLoss("0.1"), "coeff='0.1'; it must be a number"),
        (lambda: GShardLoss(float("inf")), "coeff=inf"),
        (lambda: Router(8, 4, 2.0), "top_k=2.0"),
        (lambda: PhiBalancing(1, potential=5), "potential=5; choose"),
        (
            lambda: Router(8, 8, 2, num_groups=4, group_top_k=1, balancers="eqb"),
            "ExactQuantile: the groups leave every token exactly",
        ),
        (lambda: Router(8, 8, 2, num_groups=4, group_top_k=1, balancers="qb"), "ShardQuantile: the groups"),
        (lambda: Router(8, 8, 2, num_groups=4, group_top_k=1, balancers="qb_histogram"), "HistogramQuantile: the groups"),
        (lambda: Router(8, 8, 2, num_groups=4, group_top_k=2, balancers="uniform"), "ForcedUniform with groups"),
        (lambda: evenload.anchor_loss(torch.zeros(1), Router(8, 4, 2)), r"shape \(1,\).*scalar"),
        (lambda: Router(8, 4, 2).eval()(torch.zeros(3, 8), document_ids=torch.zeros(4)), "document_ids have shape"),
        (lambda: GShardLoss(0.1, "batch"), "scope='batch'; choose one of 'microbatch'"),
        (lambda: LoadErrorInjection(-1), "LoadErrorInjection: coeff=-1"),
        (lambda: LoadErrorInjection(0.1, tau=0), "tau=0"),
        (lambda: LoadErrorInjection(0.1, scale="sum"), "scale='sum'"),
        (lambda: LossFree(-1e-3), "LossFree: rate=-0.001"),
        (lambda: ZLoss(-1), "ZLoss: coeff=-1"),
        (lambda: ShardQuantile(1.0), "ema=1.0"),
        (lambda: HistogramQuantile(1), "bins=1"),
        (lambda: ExactQuantile("probs"), "space='probs'"),
        (lambda: PhiBalancing(-1), "coeff=-1"),
        (lambda: PhiBalancing(1, eta=0), "eta=0"),
        (lambda: PhiBalancing(1, potential=("lp", 1)), r"potential=\('lp', 1\); choose 'negentropy'"),
        (lambda: PhiBalancing(1, potential="entropy"), "potential='entropy'"),
        (lambda: PhiBalancing(1, track="both"), "track='both'"),
        (lambda: PhiBalancing(1, update="never"), "update='never'"),
        (lambda: Sinkhorn(0), "iterations=0"),
        (lambda: evenload.anchor_loss(torch.zeros(2), Router(8, 4, 2)), r"shape \(2,\).*scalar"),
        (lambda: evenload.attach(torch.nn.Linear(1, 1), None), "found no Router"),
        (lambda: route(torch.zeros(2, 4), 2, bias=torch.zeros(3)), r"bias has shape \(3,\)"),
        (lambda: route(torch.zeros(2, 4), 2, replay=torch.tensor([[0, 1]])), r"replay has shape \(1, 2\)"),
        (lambda: route(torch.zeros(2, 4), 2, replay=torch.tensor([[0, 1], [2, 4]])), r"0\.\.3.*found 0\.\.4"),
        (lambda: route(torch.zeros(2, 4), 2, replay=torch.tensor([[0, 1], [2, 2]])), "repeats an id"),
        (lambda: route(torch.zeros(2, 4), 2, replay=torch.zeros(2, 2)), "torch.float32; give integer"),
    ],
)
def test_bad_input_says_what_would_be_right(build, complaint):
    with pytest.raises(ValueError, match=complaint):
        build()


def test_a_balancer_serves_one_router():
    shared = ExactQuantile()
    Router(8, 4, 2, balancers=[shared])
    with pytest.raises(ValueError, match="already belongs to a router; every router needs its own"):
        Router(8, 4, 2, balancers=[shared])


def test_replay_reproduces_a_rollout_and_stays_differentiable():
    router = Router(8, 4, 2, balancers="eqb+lei", normalize=True)
    x = torch.randn(3, 5, 8)
    mask = torch.rand(3, 5) > 0.2
    rollout = router.eval()(x, mask=mask)
    replay = rollout.indices.view(3, 5, 2).clone()
    replay[~mask] = -1  # whatever stands on padding rows
    again = router.train()(x, mask=mask, replay=replay.to(torch.int32))
    assert torch.equal(again.counts, rollout.counts)
    assert torch.equal(again.weights, rollout.weights)
    again.weights.square().sum().backward()
    assert router.weight.grad.abs().sum() > 0


def test_weights_are_normalised_then_scaled():
    logits = torch.randn(6, 5)
    plain = route(logits, 3, score="sigmoid").weights
    scaled = route(logits, 3, score="sigmoid", normalize=True, scale=2.5).weights
    torch.testing.assert_close(scaled, 2.5 * plain / plain.sum(dim=1, keepdim=True))
    assert route(torch.full((1, 3), -200.0), 2, normalize=True).weights.isfinite().all()


def test_any_leading_shape():
    router = Router(8, 4, 2)
    x = torch.randn(2, 3, 5, 8)
    assert torch.equal(router(x).weights, router(x.view(30, 8)).weights)
    assert router(x[0, 0, 0]).indices.shape == (1, 2)


def test_group_limited_routing_by_hand():
    """Groups (0 1) (2 3) (4 5); their values 5.5, 6, 5; the best two groups hold experts 0..3."""
    logits = torch.tensor([[5.0, 0.5, 3.0, 3.0, 2.5, 2.5]])
    routing = route(logits, 3, score="identity", num_groups=3, group_top_k=2)
    assert routing.indices.tolist() == [[0, 2, 3]]
    assert routing.cutoff.item() == 0.5
    assert routing.allowed.tolist() == [[True] * 4 + [False] * 2]


def test_sinkhorn_balances_the_microbatch_it_sees():
    logits = torch.randn(1024, 8) + torch.arange(8)
    plain, balanced = route(logits, 2), Router(None, 8, 2, balancers="sinkhorn")(logits)
    assert evenload.metrics.max_vio(balanced.counts) < 0.2 * evenload.metrics.max_vio(plain.counts)


def test_forced_uniform_is_as_even_as_integers_allow():
    for rows in (1, 7, 50):
        counts = Router(None, 6, 4, balancers="uniform")(torch.randn(rows, 6)).counts
        assert counts.max() - counts.min() <= 1


def test_loss_free_moves_by_the_sign_of_the_error():
    router = Router(None, 3, 1, balancers=[LossFree(0.1, centred=False)])
    router(torch.tensor([[9.0, 0, 0], [9, 0, 0], [0, 9, 0]]))
    evenload.balance_step(router)
    assert router.balancers[0].bias.tolist() == pytest.approx([-0.1, 0.0, 0.1])
    centred = Router(None, 3, 1, balancers="loss_free")
    centred(torch.tensor([[9.0, 0, 0]]))
    evenload.balance_step(centred)
    assert centred.balancers[0].bias.sum().item() == pytest.approx(0, abs=1e-7)
    assert centred.space == "scores"
