"""Saved by some ranks, loaded by others: FSDP2 and expert parallelism over gloo."""

import json
import os
import zlib
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from evenload.models import GPT, GPTConfig
from evenload.models.experts import Experts
from evenload.train import checkpoint
from evenload.train.checkpoint import Checkpointer, CheckpointError, list_checkpoints, read_model
from evenload.train.config import OptimConfig
from evenload.train.optim import make_optimizer

CONFIG = GPTConfig(
    vocab_size=50,
    d_model=12,  # three times four: not every dimension divides by four ranks
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    max_seq_len=16,
    num_experts=4,
    top_k=2,
    expert_hidden=6,
    balancers="eqb+lei",
)


class Layout:
    """The first `members` of all ranks, with the experts on groups of `ep`. Every rank has to make one."""

    def __init__(self, members: int, ep: int) -> None:
        self.inside = dist.get_rank() < members
        self.group = dist.new_group(range(members), backend="gloo")
        self.dense = DeviceMesh("cpu", torch.arange(members), mesh_dim_names=("dp",))
        names = ("expert_dp", "ep")
        self.experts = DeviceMesh("cpu", torch.arange(members).view(-1, ep), mesh_dim_names=names)

    def model(self, seed: int) -> tuple[GPT, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = GPT(CONFIG)
        for block in model.blocks:
            for module in block.modules():
                if isinstance(module, Experts):
                    for name, parameter in list(module.named_parameters()):
                        shard = distribute_tensor(parameter.detach(), self.experts["ep"], [Shard(0)])
                        setattr(module, name, nn.Parameter(shard))
                    fully_shard(module, mesh=self.experts["expert_dp"])
            fully_shard(block, mesh=self.dense)
        fully_shard(model, mesh=self.dense)
        return model, make_optimizer(model, OptimConfig())


def train(model: GPT, optimizer: torch.optim.Optimizer) -> None:
    """Two steps with made-up gradients, the same for every layout, and balancers that have learnt something."""
    for step in range(2):
        for name, parameter in model.named_parameters():
            torch.manual_seed(zlib.crc32(f"{name} {step}".encode()))
            gradient = torch.randn(parameter.shape)
            if isinstance(parameter, DTensor):
                gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
            parameter.grad = gradient
        optimizer.step()
    for name, buffer in model.named_buffers():
        torch.manual_seed(zlib.crc32(name.encode()))
        buffer.normal_()


def everything(model: GPT, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every tensor of the training state, whole."""
    state = dict(model.state_dict())
    for name, parameter in model.named_parameters():
        state |= {f"{name} {moment}": value for moment, value in optimizer.state[parameter].items()}
    return {name: (value.full_tensor() if isinstance(value, DTensor) else value).clone() for name, value in state.items()}


def save(rank: int, group: object, folder: str, members: int, ep: int) -> list[float] | None:
    layout = Layout(members, ep)
    if not layout.inside:
        return None
    model, optimizer = layout.model(seed=0)
    train(model, optimizer)
    state = everything(model, optimizer)
    torch.manual_seed(100 + rank)
    with Checkpointer(Path(folder) / "checkpoints", 2, layout.group) as checkpoints:
        checkpoints.save(3, model, optimizer, {"position": 42})
    if rank == 0:
        torch.save(state, Path(folder) / "state.pt")
    return torch.rand(2).tolist()


def load(rank: int, group: object, folder: str, members: int, ep: int) -> tuple[list[str], Any, list[float]] | None:
    layout = Layout(members, ep)
    if not layout.inside:
        return None
    model, optimizer = layout.model(seed=1)
    torch.manual_seed(200 + rank)
    checkpoints = Checkpointer(Path(folder) / "checkpoints", 2, layout.group)
    found, _ = checkpoints.newest()
    checkpoints.load(found, model, optimizer)
    drawn = torch.rand(2).tolist()
    return _different(everything(model, optimizer), folder), found.extra, drawn


def _different(state: dict[str, Tensor], folder: str) -> list[str]:
    saved = torch.load(Path(folder) / "state.pt", weights_only=True)
    assert state.keys() == saved.keys()
    assert any("eqb.bias" in name for name in state)
    assert any("w_down exp_avg_sq" in name for name in state)
    return [name for name, value in state.items() if not torch.equal(value, saved[name])]


def single(folder: Path) -> list[str]:
    model = GPT(CONFIG)
    optimizer = make_optimizer(model, OptimConfig())
    checkpoints = Checkpointer(folder / "checkpoints")
    found, _ = checkpoints.newest()
    checkpoints.load(found, model, optimizer)
    assert found.extra == {"position": 42}
    whole = read_model(found)
    assert all(torch.equal(value, whole[name]) for name, value in model.state_dict().items())
    return _different(everything(model, optimizer), str(folder))


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [((4, 2), [(4, 2), (4, 1), (2, 2), (2, 1), (1, 1)]), ((4, 4), [(4, 2), (1, 1)]), ((2, 1), [(4, 2), (2, 2)])],
    ids=["4 ranks, ep 2", "4 ranks, ep 4", "2 ranks, ep 1"],
)
def test_any_layout_loads_what_another_saved(
    ranks: Ranks, tmp_path: Path, saved: tuple[int, int], loaded: list[tuple[int, int]]
) -> None:
    """Parameters, moments, balancers and position: to the bit. Random numbers go on where the number of ranks is the same."""
    going_on = ranks.run(4, save, str(tmp_path), *saved)
    for layout in loaded:
        answers = [answer for answer in ranks.run(4, load, str(tmp_path), *layout) if answer is not None]
        assert len(answers) == layout[0]
        for rank, (different, extra, drawn) in enumerate(answers):
            assert (different, extra) == ([], {"position": 42})
            assert (drawn == going_on[rank]) == (layout[0] == saved[0])
    assert single(tmp_path) == []


def test_a_single_process_saves_for_many(ranks: Ranks, tmp_path: Path) -> None:
    model = GPT(CONFIG)
    optimizer = make_optimizer(model, OptimConfig())
    train(model, optimizer)
    torch.save(everything(model, optimizer), tmp_path / "state.pt")
    with Checkpointer(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(3, model, optimizer, {"position": 42})
    for different, extra, _ in ranks.run(4, load, str(tmp_path), 4, 2):
        assert (different, extra) == ([], {"position": 42})


def fail(rank: int, group: object, folder: str) -> list[str]:
    """What each rank is told when one of them cannot write, read, or find what it looks for."""
    layout = Layout(4, 2)
    model, optimizer = layout.model(seed=0)
    train(model, optimizer)
    checkpoints = Checkpointer(Path(folder), 3, layout.group)
    said = []

    def attempt(work: Any) -> None:
        try:
            work()
        except CheckpointError as error:
            said.append(str(error).replace(folder, ""))

    for step in (1, 2):
        checkpoints.save(step, model, optimizer, {"step": step})
    checkpoints.wait()
    real = dcp.filesystem.FileSystem.create_stream

    @contextmanager
    def full(self: object, path: Path, mode: str) -> Any:
        with real(self, Path("/dev/full"), mode) as stream:
            yield stream

    if rank == 2:
        dcp.filesystem.FileSystem.create_stream = full
    checkpoints.save(3, model, optimizer, {})
    attempt(checkpoints.wait)
    dcp.filesystem.FileSystem.create_stream = real

    publish = checkpoint.publish_folder
    if rank == 0:
        checkpoint.publish_folder = lambda *_, **__: os.rename("/nowhere/at/all", "/nowhere/else")
    checkpoints.save(3, model, optimizer, {})
    attempt(lambda: checkpoints.save(4, model, optimizer, {}))
    checkpoint.publish_folder = publish

    dist.barrier()
    if rank == 0:
        said.append(" ".join(sorted(os.listdir(folder))))
        file = Path(folder) / "step-00000002" / "__3_0.distcp"
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    dist.barrier()
    attempt(lambda: checkpoints.open(Path(folder) / "step-00000002"))
    found, refused = checkpoints.newest()
    said.append(f"{found.step} {len(refused)}")
    if rank == 1:
        dcp.FileSystemReader.read_data, reader = None, dcp.FileSystemReader.read_data
    attempt(lambda: checkpoints.load(found, model, optimizer))
    if rank == 1:
        dcp.FileSystemReader.read_data = reader
        optimizer = torch.optim.AdamW(list(model.parameters())[:1])
    attempt(lambda: checkpoints.load(found, model, optimizer))
    return said


def test_what_fails_on_one_rank_fails_on_all_with_the_same_words(ranks: Ranks, tmp_path: Path) -> None:
    told = ranks.run(4, fail, str(tmp_path))
    kept = told[0].pop(2)
    assert kept == "step-00000001 step-00000002", "no half of one"
    assert told[1:] == [told[0]] * 3
    newest = "the newest checkpoint is /step-00000002"
    full, commit, damaged, found, unread, names = told[0]
    assert full == f"checkpoint /step-00000003: cannot be written: rank 2: [Errno 28] No space left on device; {newest}"
    assert commit.startswith("checkpoint /step-00000003: cannot be written: rank 0: [Errno 2] No such file or directory")
    assert damaged.startswith("checkpoint /step-00000002: rank ")
    assert damaged.endswith("__3_0.distcp is damaged (its SHA-256 differs from the manifest)")
    assert found == "1 1"
    assert unread.startswith("checkpoint /step-00000001: rank 1: __")
    assert names.startswith("checkpoint /step-00000001: rank 1: the optimizer has no optimizer.")


def overlap(rank: int, group: object, folder: str) -> list[int]:
    """Collectives of training and of a save at the same time, in an order that differs between the ranks."""
    layout = Layout(4, 2)
    model, optimizer = layout.model(seed=0)
    checkpoints = Checkpointer(Path(folder), 5)  # makes a group of its own
    sums = []
    for step in range(1, 4):
        checkpoints.save(step, model, optimizer, {})
        for number in range(20):
            value = torch.tensor(float(number * rank))
            dist.all_reduce(value)
            sums.append(int(value) == number * 6)
    checkpoints.close()
    return [len(sums), sum(sums), len(list_checkpoints(Path(folder)))]


def test_a_save_does_not_disturb_the_collectives_of_training(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(4, overlap, str(tmp_path)) == [[60, 60, 3]] * 4
    manifest = json.loads((tmp_path / "step-00000003" / "manifest.json").read_text())
    assert manifest["world_size"] == 4
    assert sorted(manifest["files"]) == [*(f"__{rank}_0.distcp" for rank in range(4)), "index.json"]
