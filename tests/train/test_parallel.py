"""A model over many ranks has the weights, the gradients and the balance of the same model in one process."""

import pytest
import torch
from ranks import Ranks
from torch.distributed.tensor import DTensor

from evenload.balancers import balance_step, routers
from evenload.models import GPT, GPTConfig
from evenload.train import parallel
from evenload.train.config import OptimConfig
from evenload.train.layout import Layout
from evenload.train.mixture import Batch
from evenload.train.optim import make_optimizer
from evenload.train.parallel import build_sharded, make_meshes
from evenload.train.step import accumulate, train_step
from evenload.train.world import World

LAYOUTS = [
    Layout(1, 2, 1), Layout(1, 2, 2), Layout(2, 1, 1),
    Layout(1, 4, 1), Layout(1, 4, 2), Layout(1, 4, 4), Layout(2, 2, 1), Layout(2, 2, 2),
]  # fmt: skip
MICROBATCHES, ROWS, LENGTH = 4, 2, 12


def shape(**changes: object) -> GPTConfig:
    return GPTConfig(
        **{
            "vocab_size": 64, "d_model": 16, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "num_experts": 8, "top_k": 2,
            "expert_hidden": 8, "shared_hidden": 8, "num_dense_layers": 1, "balancers": "eqb+lei",
        } | changes
    )  # fmt: skip


def batches(first: int, step: int) -> list[Batch]:
    """Microbatches `first`, `first + step`, ...: of different numbers of targets, so that a plain mean would be wrong."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(64, (MICROBATCHES, ROWS, LENGTH), generator=generator)
    targets = tokens.roll(-1, 2)
    for number in range(MICROBATCHES):
        targets[number, :, number + 3 :: 4] = -100
    return [Batch(tokens[n], targets[n], torch.zeros_like(tokens[n]), (0,)) for n in range(first, MICROBATCHES, step)]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def build(config: GPTConfig, layout: Layout | None, autocast: torch.dtype | None = None) -> GPT:
    torch.manual_seed(3)
    if layout is None:
        return GPT(config)
    return build_sharded(config, make_meshes(layout, "cpu", 60), torch.device("cpu"), autocast)


def weights_and_gradients(rank: int, group: object, config: GPTConfig, layout: Layout | None, mode: str = "none") -> dict:
    """Initial weights, and the gradients and balance of a step, whole, whatever the layout."""
    world = layout.world if layout else 1
    model = build(config, layout)
    model.set_activation_checkpointing(mode)
    weights = {name: whole(tensor) for name, tensor in model.state_dict().items()}
    own = batches(rank, world)
    targets = sum(batch.num_targets for batch in batches(0, 1))
    accumulate(model, own, targets, ranks=world)
    gradients = {name: whole(parameter.grad) for name, parameter in model.named_parameters()}
    report = balance_step(model)
    return {
        "weights": weights,
        "gradients": gradients,
        "counts": torch.stack(list(report.counts)),
        "biases": {name: bias.clone() for name, bias in model.state_dict().items() if name.endswith("eqb.bias")},
    }


RECOMPUTED = [(layout, mode) for layout in (Layout(1, 4, 2), Layout(2, 2, 2)) for mode in ("selective", "full")]


@pytest.mark.parametrize(("layout", "mode"), [*((layout, "none") for layout in LAYOUTS), *RECOMPUTED], ids=str)
def test_weights_gradients_and_balance_of_one_process(ranks: Ranks, layout: Layout, mode: str) -> None:
    expected = weights_and_gradients(0, None, shape(), None)
    for found in ranks.run(layout.world, weights_and_gradients, shape(), layout, mode):
        for name, weight in expected["weights"].items():
            assert torch.equal(found["weights"][name], weight), name
        for name, gradient in expected["gradients"].items():
            torch.testing.assert_close(
                found["gradients"][name], gradient, rtol=1e-4, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}"
            )
        assert torch.equal(found["counts"], expected["counts"])
        for name, bias in expected["biases"].items():
            assert torch.equal(found["biases"][name], bias), name


def errors_over_the_group(rank: int, group: object, scope: str) -> list[torch.Tensor]:
    """What LEI adds to the scores of the first microbatch, with the weights of the routers alike."""
    config = shape(balancers=[{"name": "lei", "coeff": 1.0, "scope": scope}], num_layers=1, num_dense_layers=0)
    model = build(config, Layout(1, 2, 2))
    (router,) = routers(model).values()
    seen = []
    router.register_forward_hook(lambda _, __, routing: seen.append(routing))
    batch = batches(rank, 2)[0]
    model(batch.tokens, batch.targets)
    injection = router.balancers["lei"].inject(seen[0], torch.zeros(()))
    return [seen[0].counts, injection.scores[0] * seen[0].scores.shape[0]]


def test_lei_follows_the_errors_of_the_expert_parallel_group(ranks: Ranks) -> None:
    own = ranks.run(2, errors_over_the_group, "rank")
    shared = ranks.run(2, errors_over_the_group, "ep")
    assert not torch.equal(own[0][1], own[1][1])
    assert torch.equal(shared[0][1], shared[1][1])
    counts = own[0][0] + own[1][0]
    assert torch.equal(shared[0][1].sign(), (counts * 8.0 / counts.sum() - 1).sign())


def in_bf16(rank: int, group: object, layout: Layout) -> dict:
    model = build(shape(), layout, torch.bfloat16)
    computed = []
    for router in routers(model).values():
        router.register_forward_hook(lambda module, _, routing: computed.append((module.weight.dtype, routing.logits.dtype)))
    optimizer = make_optimizer(model, OptimConfig())
    result = train_step(model, optimizer, batches(rank, layout.world), autocast=torch.bfloat16, world=World(rank, layout.world))
    return {
        "computed": set(computed),
        "kept": {tensor.dtype for tensor in model.state_dict().values()},
        "loss": result.loss,
        "good": result.good,
    }


def test_mixed_precision_keeps_parameters_gates_and_biases_in_float32(ranks: Ranks) -> None:
    plain = accumulate(build(shape(), None), batches(0, 1), sum(batch.num_targets for batch in batches(0, 1)))[0]
    for found in ranks.run(2, in_bf16, Layout(1, 2, 2)):
        assert found["computed"] == {(torch.float32, torch.float32)}
        assert found["kept"] == {torch.float32}
        assert found["good"]
        assert found["loss"] == pytest.approx(float(plain), rel=2e-2)


def compiled(rank: int, group: object, layout: Layout) -> float:
    model = build(shape(), layout)
    model.compile_blocks(backend="aot_eager")
    return train_step(
        model, make_optimizer(model, OptimConfig()), batches(rank, layout.world), world=World(rank, layout.world)
    ).loss


def test_compiled_blocks_over_ranks(ranks: Ranks) -> None:
    plain = accumulate(build(shape(), None), batches(0, 1), sum(batch.num_targets for batch in batches(0, 1)))[0]
    for loss in ranks.run(2, compiled, Layout(1, 2, 2)):
        assert loss == pytest.approx(float(plain), rel=1e-5)


def started_badly(rank: int, group: object, fault: str) -> str:
    torch.manual_seed(rank if fault == "seeds" else 3)
    meshes = make_meshes(Layout(1, 2, 2), "cpu", 60)
    if fault == "experts":
        original, parallel._initialise = parallel._initialise, lambda *_: 0  # experts stay as to_empty left them
        original_empty, GPT.to_empty = GPT.to_empty, lambda self, **k: zeroed(original_empty(self, **k))
    try:
        build_sharded(shape(), meshes, torch.device("cpu"), None)
    except RuntimeError as error:
        return str(error)
    finally:
        if fault == "experts":
            parallel._initialise, GPT.to_empty = original, original_empty
    return ""


@torch.no_grad()
def zeroed(model: GPT) -> GPT:
    for parameter in model.parameters():
        parameter.zero_()
    return model


def test_the_start_is_checked(ranks: Ranks) -> None:
    assert ranks.run(2, started_badly, "none") == ["", ""]
    assert all("initialised different weights" in said for said in ranks.run(2, started_badly, "seeds"))
    assert all("hold the same experts" in said for said in ranks.run(2, started_badly, "experts"))


def norms(rank: int, group: object, layout: Layout | None) -> tuple[float, float, float]:
    world = layout.world if layout else 1
    model = build(shape(), layout)
    optimizer = make_optimizer(model, OptimConfig())
    for _ in range(2):
        result = train_step(
            model, optimizer, batches(rank, world), clip=0.1, world=World(rank, world),
            replicas=layout.dp_replicate if layout else 1,
        )  # fmt: skip
    return result.loss, result.grad_norm, result.router_grad_norm


@pytest.mark.parametrize("layout", [Layout(1, 2, 2), Layout(1, 4, 2), Layout(2, 2, 2)], ids=str)
def test_norms_and_clipping_are_those_of_the_whole_model(ranks: Ranks, layout: Layout) -> None:
    expected = norms(0, None, None)
    for found in ranks.run(layout.world, norms, layout):
        assert found == pytest.approx(expected, rel=1e-4)
