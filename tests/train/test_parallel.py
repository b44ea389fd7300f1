"""A model over many ranks has the weights, the gradients and the balance of the same model in one process."""

import pytest
import torch
from ranks import Ranks
from torch.distributed.tensor import DTensor

from evenload.balancers import balance_step
from evenload.models import GPT, GPTConfig
from evenload.train.layout import Layout
from evenload.train.mixture import Batch
from evenload.train.parallel import build_sharded, make_meshes
from evenload.train.step import accumulate

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
