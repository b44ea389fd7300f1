"""Every injected gradient against the gradient of its loss, written down naively and differentiated numerically in float64."""

import math

import pytest
import torch
from torch.autograd import gradcheck

from evenload import GShardLoss, LoadErrorInjection, PhiBalancing, Router, ZLoss, anchor_loss, balance_step
from evenload.balancers.inject import InjectGradient

EXPERTS, TOP_K, TOKENS = 6, 2, 10
SCORES = ["sigmoid", "softmax", "identity"]
MASK = torch.tensor([True] * 7 + [False] * 3)
DOCUMENTS = torch.tensor([4, 4, 4, 9, 9, 4, 4, 4, 4, 4])


def injected(balancer, logits, *, score, mask=None, document_ids=None, prepare=lambda router: None):
    """The gradient with respect to the logits that the balancer alone adds, and the routing it was made for."""
    gradients = []
    for balancers in ([balancer], []):
        router = Router(None, EXPERTS, TOP_K, balancers=balancers, score=score)
        prepare(router)
        leaf = logits.clone().requires_grad_()
        routing = router(leaf, mask=mask, document_ids=document_ids)
        (routing.weights * torch.arange(1, TOP_K + 1)).sum().backward()
        gradients.append(leaf.grad)
        if balancers:
            reported = balance_step(router).losses[balancer.name].item()
            made_for = routing
    return gradients[0] - gradients[1], made_for, reported


def numerical(loss, logits, step=1e-5):
    """Central differences of a scalar function of the logits."""
    gradient = torch.zeros_like(logits)
    for index in range(logits.numel()):
        shifted = [logits.clone(), logits.clone()]
        for sign, tensor in zip((1, -1), shifted, strict=True):
            tensor.view(-1)[index] += sign * step
        gradient.view(-1)[index] = (loss(shifted[0]) - loss(shifted[1])) / (2 * step)
    return gradient


def distribution(logits, score):
    if score == "sigmoid":
        scores = torch.sigmoid(logits)
        return scores / scores.sum(dim=1, keepdim=True)
    return torch.softmax(logits, dim=1)


@pytest.fixture
def logits():
    return torch.randn(TOKENS, EXPERTS, dtype=torch.float64)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("score", SCORES)
def test_gshard(logits, score, masked):
    mask = MASK if masked else None
    real = MASK if masked else torch.ones(TOKENS, dtype=torch.bool)
    gradient, routing, reported = injected(GShardLoss(0.5), logits, score=score, mask=mask)
    share = routing.counts / routing.counts.sum()

    def loss(z):
        return 0.5 * EXPERTS * (share * distribution(z, score)[real].mean(dim=0)).sum()

    torch.testing.assert_close(gradient, numerical(loss, logits), atol=1e-8, rtol=1e-6)
    assert reported == pytest.approx(float(loss(logits)), rel=1e-6)


@pytest.mark.parametrize("score", SCORES)
def test_gshard_per_document(logits, score):
    """Three documents: the second run of id 4 is a document of its own. Each weighs as much as its tokens."""
    gradient, routing, reported = injected(GShardLoss(0.5, "sequence"), logits, score=score, document_ids=DOCUMENTS)

    def loss(z):
        total = 0.0
        for document in (slice(0, 3), slice(3, 5), slice(5, 10)):
            counts = torch.bincount(routing.indices[document].flatten(), minlength=EXPERTS)
            share = counts / counts.sum()
            mean = distribution(z, score)[document].mean(dim=0)
            total = total + (document.stop - document.start) / TOKENS * 0.5 * EXPERTS * (share * mean).sum()
        return total

    torch.testing.assert_close(gradient, numerical(loss, logits), atol=1e-8, rtol=1e-6)
    assert reported == pytest.approx(float(loss(logits)), rel=1e-6)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("track", ["probs", "counts"])
@pytest.mark.parametrize("potential", ["negentropy", "quadratic", ("lp", 3), ("tsallis", 0.5)])
def test_phi(logits, potential, track, score, masked):
    mask = MASK if masked else None
    real = MASK if masked else torch.ones(TOKENS, dtype=torch.bool)
    mean = torch.softmax(torch.randn(EXPERTS), dim=0)
    balancer = PhiBalancing(0.5, eta=0.6, potential=potential, track=track)
    gradient, routing, reported = injected(
        balancer, logits, score=score, mask=mask, prepare=lambda r: [b.mean.copy_(mean) for b in r.balancers]
    )

    # grad phi, from the definition of each potential, divided by its curvature at the uniform point over E
    x = mean.double()
    slope, curvature = {
        "negentropy": (x.log() + 1, EXPERTS),
        "quadratic": (x, 1),
        ("lp", 3): (3 * x**2, 6 / EXPERTS),
        ("tsallis", 0.5): (0.5 * x**-0.5 / (0.5 - 1), 0.5 * EXPERTS**1.5),
    }[potential]
    slope = slope * EXPERTS / curvature

    def loss(z):
        return 0.5 * (distribution(z, score)[real].mean(dim=0) * slope).sum()

    torch.testing.assert_close(gradient, numerical(loss, logits), atol=1e-7, rtol=1e-5)
    # The state follows the batch: m <- (1 - eta) m + eta p.
    p = routing.counts / routing.counts.sum() if track == "counts" else distribution(logits, score)[real].mean(dim=0)
    torch.testing.assert_close(balancer.mean.double(), 0.4 * x + 0.6 * p.double(), atol=1e-6, rtol=1e-6)
    assert math.isfinite(reported)


def test_phi_before_the_step_mixes_in_its_own_microbatch(logits):
    balancer = PhiBalancing(0.5, eta=0.25, update="microbatch")
    gradient, *_ = injected(balancer, logits, score="softmax")
    local = 0.75 / EXPERTS + 0.25 * torch.softmax(logits, dim=1).mean(dim=0)

    def loss(z):
        return 0.5 * (torch.softmax(z, dim=1).mean(dim=0) * (EXPERTS * local).log()).sum()

    torch.testing.assert_close(gradient, numerical(loss, logits), atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("score", SCORES)
def test_z_loss(logits, score, masked):
    mask = MASK if masked else None
    real = MASK if masked else torch.ones(TOKENS, dtype=torch.bool)
    gradient, _, reported = injected(ZLoss(0.5), logits, score=score, mask=mask)

    def loss(z):
        return 0.5 * torch.logsumexp(z[real], dim=1).square().mean()

    torch.testing.assert_close(gradient, numerical(loss, logits), atol=1e-8, rtol=1e-6)
    assert reported == pytest.approx(float(loss(logits)), rel=1e-6)


@pytest.mark.parametrize("scale", ["mean", "absolute"])
@pytest.mark.parametrize("tau", [0.5, 1.0, 100.0])
def test_load_error_injection(logits, tau, scale):
    """lambda g rho on the scores of every real token and expert, chosen or not; bounded by lambda tau."""
    balancer = LoadErrorInjection(0.5, tau=tau, scale=scale)
    gradient, routing, reported = injected(balancer, logits, score="identity", mask=MASK)
    tokens = int(MASK.sum())
    rho = routing.counts.double() * EXPERTS / (TOP_K * tokens) - 1
    xi = rho.abs().max() / tau
    strength = 0.5 / (tokens if scale == "mean" else 1)
    expected = (strength * torch.tanh(xi) / xi * rho).expand(TOKENS, -1) * MASK[:, None]
    torch.testing.assert_close(gradient, expected, atol=1e-12, rtol=1e-9)
    assert gradient.abs().max() < strength * tau
    quadratic = 0.5 * (tokens if scale == "absolute" else 1) * TOP_K / (2 * EXPERTS) * rho.square().sum()
    assert reported == pytest.approx(float(quadratic), rel=1e-6)


def test_load_error_is_the_straight_through_gradient_of_the_quadratic(logits):
    """With a large tau: c/2 sum (f - 1)^2 where every score counts as one choice, c = lambda E / (K T) inverted."""
    gradient, routing, _ = injected(LoadErrorInjection(0.5, tau=1e6), logits, score="identity")
    c = 0.5 * TOP_K / EXPERTS  # lambda / T = c E / (K T)

    def loss(z):
        soft_counts = routing.counts + (z - logits).sum(dim=0)
        return c / 2 * (soft_counts * EXPERTS / (TOP_K * TOKENS) - 1).square().sum()

    torch.testing.assert_close(gradient, numerical(loss, logits), atol=1e-8, rtol=1e-6)


def test_load_error_of_a_balanced_microbatch_is_zero():
    logits = torch.eye(EXPERTS, dtype=torch.float64).repeat(2, 1)
    gradient, routing, _ = injected(
        LoadErrorInjection(0.5), logits + torch.eye(EXPERTS).roll(1, 1).repeat(2, 1), score="identity"
    )
    assert routing.counts.unique().numel() == 1
    assert torch.equal(gradient, torch.zeros_like(gradient))


def test_injection_goes_through_the_score_function(logits):
    """On sigmoid scores the injected gradient reaches the logits through sigmoid'."""
    gradient, routing, _ = injected(LoadErrorInjection(0.5, tau=1e6), logits, score="sigmoid")
    rho = routing.counts.double() * EXPERTS / (TOP_K * TOKENS) - 1
    slope = torch.sigmoid(logits) * (1 - torch.sigmoid(logits))
    torch.testing.assert_close(gradient, 0.5 / TOKENS * rho * slope, atol=1e-7, rtol=1e-5)


def test_injection_is_an_identity_forward(logits):
    plain, with_lei = (Router(None, EXPERTS, TOP_K, balancers=b)(logits) for b in ("none", "lei+gshard+z_loss+phi"))
    assert torch.equal(plain.weights, with_lei.weights)
    assert torch.equal(plain.scores, with_lei.scores)
    leaf = logits.clone().requires_grad_()
    zero, one = torch.zeros(TOKENS, EXPERTS, dtype=torch.float64), torch.ones((), dtype=torch.float64)
    assert gradcheck(lambda z: InjectGradient.apply(torch.sigmoid(z), z, zero, zero, one), leaf)


@pytest.mark.parametrize("factor", [1.0, 2.0**16, 1 / 3])
@pytest.mark.parametrize("name", ["lei", "gshard", "phi", "z_loss"])
def test_strength_follows_the_gradient_that_reaches_the_loss(logits, name, factor):
    """Loss scaling and the 1/n of accumulation multiply injected gradients exactly like the loss's own."""
    router = Router(None, EXPERTS, TOP_K, balancers=name)
    gradients = []
    for strength in (1.0, factor):
        leaf = logits.clone().requires_grad_()
        loss = anchor_loss(router(leaf).weights.mean(), router)
        (strength * loss).backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(gradients[1], factor * gradients[0], rtol=1e-6, atol=0)


def test_the_strength_of_one_step_does_not_leak_into_the_next(logits):
    router = Router(None, EXPERTS, TOP_K, balancers="lei")
    gradients = []
    for factor in (None, 1024.0, None):
        leaf = logits.clone().requires_grad_()
        loss = router(leaf).weights.mean()
        (loss if factor is None else factor * anchor_loss(loss, router)).backward()
        balance_step(router)
        gradients.append(leaf.grad)
    assert torch.equal(gradients[0], gradients[2])


def test_a_share_of_the_steps_loss_has_the_strength_of_that_share(logits):
    """sum / (tokens of the whole step), in two parts, is what mean / 2 is for two equal parts."""
    found = []
    for share in (1.0, 0.5):
        router = Router(None, logits.shape[-1], 2, balancers="lei")
        given = logits.detach().clone().requires_grad_()
        loss = router(given).weights.mean() * share
        (anchor_loss(loss, router, share) / (2 * share)).backward()
        found.append(given.grad)
    torch.testing.assert_close(found[0], found[1])


def test_an_anchored_loss_may_be_changed_in_place(logits):
    router = Router(None, logits.shape[-1], 2, balancers="lei")
    loss = anchor_loss(router(logits.detach().requires_grad_()).weights.mean(), router)
    loss /= 4
    loss.backward()
    assert router.loss_grad == 0.25
