"""A GPT over many ranks: meshes, experts split by expert parallelism, everything sharded by FSDP2, the same weights.

Which rank holds what is decided here; the model's code knows nothing of it but where experts read their weights and which
dispatcher moves the rows.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ..balancers import LoadErrorInjection, routers
from ..balancers.balancer import StatefulModule
from ..models import GPT, AllToAllDispatcher, Block, Experts, GPTConfig, MoELayer
from .layout import Layout


@dataclass(frozen=True)
class Meshes:
    """The ranks of a layout as torch sees them.

    Attributes:
        dense: what shards dense parameters: (dp_shard,), or (dp_replicate, dp_shard).
        expert_dp: what shards a rank's experts: (expert_dp,), or (dp_replicate, expert_dp).
        ep: among whose ranks the experts are split.
    """

    layout: Layout
    dense: DeviceMesh
    expert_dp: DeviceMesh
    ep: DeviceMesh

    def groups(self) -> Iterator[dist.ProcessGroup]:
        """Every process group, in the same order on every rank."""
        for mesh in (self.dense, self.expert_dp, self.ep):
            yield from mesh.get_all_groups()


def make_meshes(layout: Layout, device_type: str, timeout: float) -> Meshes:
    """The meshes of `layout`, every process group used once: a network that does not work is found before the first step."""
    replicate, shard = layout.dp_replicate, layout.dp_shard
    copies = ("dp_replicate",) if replicate > 1 else ()
    dense = init_device_mesh(device_type, (replicate, shard), mesh_dim_names=("dp_replicate", "dp_shard"))
    shape = (replicate, layout.expert_dp, layout.ep)
    expert = init_device_mesh(device_type, shape, mesh_dim_names=("dp_replicate", "expert_dp", "ep"))
    meshes = Meshes(layout, dense[(*copies, "dp_shard")], expert[(*copies, "expert_dp")], expert["ep"])
    for group in meshes.groups():
        # A mesh gives its groups torch's default timeout.
        dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=timeout), group)
        dist.all_reduce(torch.ones((), device=device_type), group=group)
    return meshes


def build_sharded(config: GPTConfig, meshes: Meshes, device: torch.device, autocast: torch.dtype | None) -> GPT:
    """A GPT of which every rank holds its part, with the weights that a GPT built in one process has for the same seed.

    The model is laid out without memory; then one part after the other is initialised whole on every rank, of which each keeps
    its share. torch's generators must stand alike on all ranks.

    Raises RuntimeError if dense weights differ between ranks, or experts do not.
    """
    model = lay_out(config, meshes, autocast)
    with torch.device("meta"):
        twin = GPT(config)
    model.to_empty(device=device)
    for module in model.modules():
        if isinstance(module, StatefulModule):
            module.reset_statistics()
    _check_start(model, _initialise(model, twin, device), meshes)
    return model


def lay_out(config: GPTConfig, meshes: Meshes, autocast: torch.dtype | None) -> GPT:
    """A GPT on the meta device whose parameters are this rank's part of the model."""
    with torch.device("meta"):
        model = GPT(config)
    _split_experts(model, meshes)
    _fully_shard(model, meshes, autocast)
    return model


def _split_experts(model: GPT, meshes: Meshes) -> None:
    """Each rank of the ep group gets its experts, and a dispatcher that reaches the others."""
    ep = meshes.layout.ep
    group = meshes.ep.get_group()
    for layer in moe_layers(model):
        if ep > 1:
            for name, weight in layer.experts.named_parameters():
                local = distribute_tensor(weight.detach(), meshes.ep, [Shard(0)], src_data_rank=None)
                setattr(layer.experts, name, nn.Parameter(local))
            layer.experts.read = ExpertShard(1 / ep)
            layer.dispatcher = AllToAllDispatcher(layer.experts.num_experts, group, layer.dispatcher.capacity_factor)
    for router in routers(model).values():
        for balancer in router.balancers:
            if isinstance(balancer, LoadErrorInjection) and balancer.scope == "ep":
                balancer.use_group(group)


def _fully_shard(model: GPT, meshes: Meshes, autocast: torch.dtype | None) -> None:
    # Parameters are gathered in the dtype that autocast would compute in, and gradients summed in float32. Inputs stay as
    # autocast leaves them; gates and balancers stay in float32.
    mixed = MixedPrecisionPolicy(
        param_dtype=autocast, reduce_dtype=torch.float32 if autocast else None, cast_forward_inputs=False
    )
    for block in cast(list[Block], list(model.blocks)):
        if isinstance(block.ffn, MoELayer):
            if autocast is not None:
                fully_shard(block.ffn.router, mesh=meshes.dense, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
            if meshes.layout.ep > 1:
                place = partial(_placement, block.ffn.experts, meshes.layout)
                fully_shard(block.ffn.experts, mesh=meshes.expert_dp, mp_policy=mixed, shard_placement_fn=place)
        fully_shard(block, mesh=meshes.dense, mp_policy=mixed)
    fully_shard(model, mesh=meshes.dense, mp_policy=mixed)


def _placement(experts: Experts, layout: Layout, weight: nn.Parameter) -> Shard:
    """Shard whole experts where there are enough of them for every rank, else their rows."""
    local = experts.num_experts // layout.ep
    return Shard(1) if local % layout.expert_dp and weight.shape[1] % layout.expert_dp == 0 else Shard(0)


class ExpertShard:
    """Reads the local part of an expert parameter, and scales its gradient.

    FSDP averages gradients over the ranks that shard a parameter. A dense gradient is thus the mean over all ranks; an
    expert's, which already holds the tokens of all `ep` ranks, only over expert_dp, so 1 / ep brings it to the same scale.
    """

    def __init__(self, gradient_scale: float) -> None:
        self.gradient_scale = gradient_scale

    def __call__(self, weight: Tensor) -> Tensor:
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        return _ScaleGradient.apply(local, self.gradient_scale)


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.scale, None


@torch.no_grad()
def _initialise(model: GPT, twin: GPT, device: torch.device) -> int:
    """Give `model` the weights and buffers that `reset_parameters` gives its unsharded `twin`, one part at a time.

    Returns a checksum of all of them.
    """
    total = 0

    def give(part: nn.Module, tensors: dict[str, Any]) -> None:
        nonlocal total
        total += sum(checksum(tensor) for tensor in tensors.values())
        set_model_state_dict(part, tensors, options=StateDictOptions(full_state_dict=True, strict=False))

    twin.embedding = nn.Parameter(torch.empty_like(twin.embedding, device=device))
    twin.reset_embedding()
    give(model, {"embedding": twin.embedding.detach()})
    twin.embedding = nn.Parameter(twin.embedding.to("meta"))
    for mine, theirs in zip(_parts(model), _parts(twin), strict=True):
        theirs.to_empty(device=device)
        cast(Block, theirs).reset_parameters()
        give(mine, theirs.state_dict())
        theirs.to_empty(device="meta")
    return total


def _parts(model: GPT) -> list[nn.Module]:
    """What a GPT is made of beside its embedding, in the order of `reset_parameters`."""
    return [part for part in (*model.blocks, model.final_norm, model.head) if part is not None]


def checksum(tensor: Tensor) -> int:
    """A number that depends on every bit of a tensor."""
    if tensor.numel() == 0:
        return 0
    integers = tensor.detach().contiguous().view(torch.uint8).flatten()
    places = torch.arange(len(integers), device=tensor.device) % 8191 + 1  # a prime, so that moved bytes count differently
    return int((integers * places).sum())


def _check_start(model: GPT, dense: int, meshes: Meshes) -> None:
    """Raise RuntimeError unless all ranks have initialised the same model, and hold different experts of it."""
    device = next(model.parameters()).device

    def everybody(number: int, group: dist.ProcessGroup | None) -> list[int]:
        numbers = torch.zeros(dist.get_world_size(group), dtype=torch.int64, device=device)
        numbers[dist.get_rank(group)] = number
        dist.all_reduce(numbers, group=group)
        return cast(list[int], numbers.tolist())

    if len(set(everybody(dense, None))) > 1:
        raise RuntimeError(
            "the ranks have initialised different weights; seed torch alike on all of them, and use the same torch everywhere"
        )
    if meshes.layout.ep > 1:
        parameters = [weight for layer in moe_layers(model) for weight in layer.experts.parameters()]
        mine = sum(checksum(cast(DTensor, weight).to_local()) for weight in parameters)
        if len(set(everybody(mine, meshes.ep.get_group()))) < meshes.layout.ep:
            raise RuntimeError("two ranks of an expert-parallel group hold the same experts; the model was sharded wrongly")


def moe_layers(model: nn.Module) -> list[MoELayer]:
    return [module for module in model.modules() if isinstance(module, MoELayer)]
