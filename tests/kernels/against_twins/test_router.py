"""The fused router equals its definition: integers and cutoffs to the bit, weights and gradients within rounding."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from evenload import Router, balance_step, route
from evenload.kernels import ops, router

INF, NAN = float("inf"), float("nan")
OPTIONS = {
    "bias": None,
    "mask_T": None,
    "replay_TK": None,
    "score": "sigmoid",
    "space": "logits",
    "normalize": False,
    "scale": 1.0,
    "num_groups": None,
    "group_top_k": None,
    "nan": "raise",
}
# exp differs by a few units in the last place; sums of K weights are taken in another order.
CLOSE = {"rtol": 4e-6, "atol": 1e-7}
EXACT = ("indices", "counts", "cutoff", "logits", "selection", "allowed", "nan_rows")


def bits(tensor):
    return tensor.view(torch.int32) if tensor.dtype == torch.float32 else tensor


def check(logits, k, **options):
    """Kernel against definition; where selection is on scores, on the very scores that the kernel found."""
    options = {**OPTIONS, **options}
    found, expected = (module.route_rows(logits, k, **options) for module in (ops, router))
    for name in ("weights", "scores"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), **CLOSE)
    if options["space"] == "scores":
        bias = router.evaluated(options["bias"], found.scores, options["mask_T"])
        indices, cutoff, allowed = router.select(found.scores, k, bias, options["num_groups"], options["group_top_k"])
        counts = router.expert_counts(indices, logits.shape[1], options["mask_T"])
        weights = router.combine_weights(found.scores, indices, options["mask_T"], options["normalize"], options["scale"])
        expected = expected._replace(
            indices=indices, cutoff=cutoff, allowed=allowed, counts=counts, selection=found.scores, weights=weights
        )
        torch.testing.assert_close(found.weights, weights, **CLOSE)
    for name in EXACT:
        one, other = getattr(found, name), getattr(expected, name)
        if other is None:
            assert one is None, name
        else:
            assert one.dtype == other.dtype, name
            assert torch.equal(bits(one), bits(other)), name
    return found


# (T, E, K): primes, powers of two, K = E, one and no token, one row per program, several tiles per program.
SHAPES = [
    (0, 5, 2),
    (1, 2, 1),
    (1, 2, 2),
    (37, 7, 3),
    (700, 3, 1),
    (9, 64, 8),
    (5, 97, 32),
    (4, 97, 97),
    (3, 256, 6),
    (2, 1021, 4),
    (1, 1024, 32),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape(shape):
    tokens, experts, k = shape
    logits = torch.randn(tokens, experts)
    logits[::3] = logits[::3].round()  # ties
    check(logits, k, bias=torch.randn(experts).round(), normalize=True, scale=2.5)


@pytest.mark.parametrize("score", ["sigmoid", "softmax", "identity"])
@pytest.mark.parametrize("space", ["logits", "scores"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_score_space_and_dtype(score, space, dtype):
    check(torch.randn(21, 11).to(dtype), 4, score=score, space=space, bias=torch.randn(11), normalize=score != "identity")


@pytest.mark.parametrize("groups", [(1, 1), (2, 1), (3, 2), (4, 4), (6, 5), (12, 7)], ids=str)
@pytest.mark.parametrize("space", ["logits", "scores"])
def test_groups(groups, space):
    logits = torch.randn(40, 12)
    logits[:20] = logits[:20].round()
    count, best = groups
    k = min(3, best * 12 // count)
    check(logits, k, num_groups=count, group_top_k=best, space=space, bias=torch.randn(12), mask_T=torch.rand(40) > 0.3)


def test_groups_that_are_no_power_of_two():
    check(torch.randn(30, 21).round(), 5, num_groups=3, group_top_k=2, bias=torch.randn(30, 21).round())
    check(torch.randn(30, 21).round(), 5, num_groups=7, group_top_k=3)


def test_bias_as_a_function_of_the_selection_values():
    mask = torch.rand(17) > 0.4
    for space in ("logits", "scores"):
        check(torch.randn(17, 6), 2, space="logits", bias=lambda selection, mask: -selection.mean(dim=0), mask_T=mask)
        assert ops.route_rows(torch.randn(17, 6), 2, **{**OPTIONS, "bias": lambda s, m: -s.mean(dim=0), "space": space})


def test_replay_keeps_the_cutoff_and_replaces_the_choice():
    logits = torch.randn(8, 6)
    check(logits, 2, replay_TK=torch.rand(8, 6).argsort(dim=1)[:, :2], mask_T=torch.arange(8) < 5, normalize=True)


WICKED = [0.0, -0.0, 1.0, 1.0, -1.0, -INF, 3e38, -3e38, 1e-45, -1e-45, 16.7, 2.5]


@st.composite
def cases(draw):
    rows, groups, members = draw(st.integers(0, 5)), draw(st.integers(1, 4)), draw(st.integers(1, 5))
    experts = max(2, groups * members)
    groups = groups if experts == groups * members else 1
    cells = st.sampled_from([*WICKED, INF, NAN])
    logits = torch.tensor(draw(st.lists(cells, min_size=rows * experts, max_size=rows * experts))).view(rows, experts)
    options = {"nan": "route", "score": draw(st.sampled_from(["sigmoid", "softmax", "identity"]))}
    best = draw(st.integers(1, groups))
    if draw(st.booleans()):
        options |= {"num_groups": groups, "group_top_k": best}
    else:
        best = groups
    if draw(st.booleans()):
        options["mask_T"] = torch.tensor(draw(st.lists(st.booleans(), min_size=rows, max_size=rows)), dtype=torch.bool)
    if draw(st.booleans()):
        options["bias"] = torch.tensor(
            draw(st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0]), min_size=experts, max_size=experts))
        )
    return logits, draw(st.integers(1, best * experts // groups)), options


@settings(max_examples=60)
@given(cases())
def test_wicked_values(case):
    logits, k, options = case
    found = check(logits, k, **options)
    experts = logits.shape[1]
    assert ((found.indices >= 0) & (found.indices < experts)).all()
    assert (found.indices.sort(dim=1).values.diff(dim=1) > 0).all()  # K distinct ids
    mask = options.get("mask_T")
    real = len(logits) if mask is None else int(mask.sum())
    assert found.counts.sum() == real * k
    gathered = found.scores.gather(1, found.indices)
    gathered = gathered if mask is None else gathered.masked_fill(~mask[:, None], 0.0)
    assert torch.equal(found.weights, gathered)
    biased = found.selection + options.get("bias", torch.zeros(experts))
    chosen = biased.gather(1, found.indices)
    reach = torch.ones_like(biased, dtype=torch.bool) if found.allowed is None else found.allowed
    chosen = chosen.where(reach.gather(1, found.indices), -INF)
    assert (found.cutoff[:, None] <= chosen).all()


def test_a_bad_row_is_refused_or_routed():
    logits = torch.randn(5, 4)
    logits[3, 1] = NAN
    mask = torch.tensor([True, True, True, False, True])
    assert ops.route_rows(logits, 2, **OPTIONS | {"mask_T": mask}).nan_rows == 0
    assert ops.route_rows(logits, 2, **OPTIONS | {"nan": "route"}).nan_rows == 1
    if logits.device.type == "cpu":  # on a GPU it is an assertion of the device
        with pytest.raises(ValueError, match="1 of 5 rows"):
            ops.route_rows(logits, 2, **OPTIONS)


def gradients(module, logits, upstream, k, options, parts):
    leaf = logits.clone().requires_grad_()
    out = module.route_rows(leaf, k, **options)
    assert not out.cutoff.requires_grad
    assert not out.selection.requires_grad
    loss = sum((getattr(out, name) * upstream[name]).sum() for name in parts)
    return torch.autograd.grad(loss, leaf)[0]


@pytest.mark.parametrize("parts", [("weights",), ("scores",), ("weights", "scores", "logits")], ids="+".join)
@pytest.mark.parametrize("score", ["sigmoid", "softmax", "identity"])
@pytest.mark.parametrize("normalize", [False, True])
def test_gradients(parts, score, normalize):
    logits = torch.randn(29, 13)
    logits[4, 2] = NAN
    logits[6] = -200.0  # sigmoid scores of exactly 0
    logits[7, 1:] = -INF
    options = {**OPTIONS, "score": score, "normalize": normalize, "scale": 1.7, "nan": "route", "mask_T": torch.rand(29) > 0.2}
    upstream = {"weights": torch.randn(29, 5), "scores": torch.randn(29, 13), "logits": torch.randn(29, 13)}
    found, expected = (gradients(module, logits, upstream, 5, options, parts) for module in (ops, router))
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=1e-6, equal_nan=True)
    assert (found[~options["mask_T"]] == 0).all()
    assert (found[4] == 0).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients_of_every_shape(shape):
    tokens, experts, k = shape
    logits, upstream = torch.randn(tokens, experts), {"weights": torch.randn(tokens, k)}
    options = {**OPTIONS, "normalize": True, "score": "softmax"}
    found, expected = (gradients(module, logits, upstream, k, options, ("weights",)) for module in (ops, router))
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=1e-6)


def test_gradients_in_the_dtype_of_the_logits():
    logits = torch.randn(9, 6).bfloat16()
    upstream = {"weights": torch.randn(9, 2), "scores": torch.randn(9, 6), "logits": torch.randn(9, 6)}
    found, expected = (gradients(m, logits, upstream, 2, OPTIONS, tuple(upstream)) for m in (ops, router))
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected)


class Largest(TorchDispatchMode):
    """The most elements that any tensor in the backward and forward had."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


def test_no_tensor_is_larger_than_the_logits():
    logits = torch.randn(50, 16, requires_grad=True)
    with Largest() as largest:
        out = ops.route_rows(logits, 8, **OPTIONS | {"normalize": True})
        (out.weights.sum() + out.scores.sum()).backward()
    assert largest.elements == logits.numel()


def test_operators_hold_to_the_rules_of_torch():
    mask = torch.rand(6) > 0.5
    plain = None, None, 2, "sigmoid", "logits", False, 1.0, 0, 0, False
    rich = torch.randn(8), mask, 2, "softmax", "scores", True, 2.0, 4, 2, True
    for options in (plain, rich):
        torch.library.opcheck(ops.router_forward, (torch.randn(6, 8, requires_grad=True), *options))


@pytest.mark.parametrize("balancers", ["eqb+lei", "qb_histogram+gshard+z_loss"])
def test_the_router_compiles_into_one_graph(balancers):
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        module = Router(12, 6, 2, balancers=balancers, normalize=True)
        call = torch.compile(module, backend="aot_eager", fullgraph=True) if compiled else module
        x = torch.randn(40, 12, requires_grad=True)
        for _ in range(2):
            out = call(x, mask=torch.arange(40) < 33)
            (out.weights * torch.arange(2.0)).sum().backward()
            balance_step(module)
        results.append([out.indices, out.weights.detach(), x.grad, module.weight.grad, *module.buffers()])
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager)


def test_float64_goes_to_the_definition():
    logits = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: route(x, 2, score="softmax", normalize=True).weights, logits)


def test_two_runs_give_the_same_bits():
    logits = torch.randn(300, 24).round()
    first, second = (ops.route_rows(logits, 4, **OPTIONS | {"normalize": True}) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert one is None or torch.equal(one, other)
