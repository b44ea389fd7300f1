import errno
import hashlib
import io
import json
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import threading
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from evenload.balancers import Router, attach
from evenload.train import checkpoint, files
from evenload.train.checkpoint import MANIFEST, Checkpointer, CheckpointError, list_checkpoints, read_manifest
from evenload.train.ranks import RankError, Ranks
from evenload.train.rng import restore_rng, rng_state
from evenload.train.shards import INDEX, write_shards

DATA = "__0_0.distcp"


def made(value: float, width: int = 8) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model full of `value`, and an optimizer that has taken a step."""
    model = nn.Sequential(nn.Linear(width, 4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, fused=True)
    model(torch.ones(1, width)).sum().backward()
    optimizer.step()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model, optimizer


def save(folder: Path, step: int, keep: int = 2, value: float | None = None) -> Path:
    with Checkpointer(folder, keep) as checkpoints:
        checkpoints.save(step, *made(step if value is None else value), {"step": step})
    return folder / f"step-{step:08d}"


def load(path: Path) -> float:
    model, optimizer = made(0)
    checkpoints = Checkpointer(path.parent)
    checkpoints.load(checkpoints.open(path), model, optimizer)
    return model[0].weight[0, 0].item()


def names(folder: Path) -> list[str]:
    return [path.name for path in list_checkpoints(folder)]


def reseal(path: Path) -> None:
    """What somebody who changes a checkpoint would do."""
    manifest = json.loads((path / MANIFEST).read_text())
    for name in manifest["files"]:
        content = (path / name).read_bytes()
        manifest["files"][name] = [len(content), hashlib.sha256(content).hexdigest()]
    del manifest["sha256"]
    seal = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    (path / MANIFEST).write_text(json.dumps(manifest | {"sha256": seal}))


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    saved, optimizer = made(7)
    with Checkpointer(tmp_path, 2) as checkpoints:
        checkpoints.save(7, saved, optimizer, {"position": 12, "nested": {"rate": 0.1}})
    model, fresh = made(0)
    fresh.param_groups[0] |= {"lr": 0.25, "weight_decay": 3.0}
    found, refused = checkpoints.newest()
    assert (found.step, found.world_size, found.extra, refused) == (7, 1, {"position": 12, "nested": {"rate": 0.1}}, [])
    checkpoints.load(found, model, fresh)
    assert all(map(torch.equal, model.state_dict().values(), saved.state_dict().values()))
    for index, moments in optimizer.state_dict()["state"].items():
        loaded = fresh.state_dict()["state"][index]
        assert list(loaded) == list(moments) == ["step", "exp_avg", "exp_avg_sq"]
        assert all(map(torch.equal, loaded.values(), moments.values()))
    assert (fresh.param_groups[0]["lr"], fresh.param_groups[0]["weight_decay"]) == (0.25, 3.0), "options are the running ones"
    assert sorted(os.listdir(tmp_path)) == ["step-00000007"]


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_only_the_newest_are_kept(tmp_path: Path, keep: int) -> None:
    for step in (5, 10, 99_999_999, 100_000_000):
        save(tmp_path, step, keep)
    expected = ["step-00000005", "step-00000010", "step-99999999", "step-100000000"]
    assert names(tmp_path) == expected[-keep:]


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    save(tmp_path, 5, value=1)
    assert load(save(tmp_path, 5, value=2)) == 2


def _flip(name: str, at: float = 0.5) -> object:
    def flip(path: Path) -> None:
        content = bytearray((path / name).read_bytes())
        content[int(len(content) * at)] ^= 1
        (path / name).write_bytes(content)

    return flip


def _newer(path: Path) -> None:
    manifest = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps(manifest | {"format": 99}))


def _another_position(path: Path) -> None:
    text = (path / MANIFEST).read_text()
    (path / MANIFEST).write_text(text.replace('"step": 10', '"step": 11'))


DAMAGE = {
    "one bit of the tensors": (_flip(DATA), f"{DATA} is damaged"),
    "one bit of the index": (_flip(INDEX), f"{INDEX} is damaged"),
    "one bit of the manifest": (_flip(MANIFEST, 0.9), f"{MANIFEST} cannot be read"),
    "another number in the manifest": (_another_position, "it is damaged"),
    "cut short": (lambda path: os.truncate(path / DATA, 100), f"{DATA} has 100 bytes instead of"),
    "no manifest": (lambda path: os.unlink(path / MANIFEST), f"{MANIFEST} cannot be read"),
    "no tensors": (lambda path: os.unlink(path / DATA), f"{DATA} is missing"),
    "no index": (lambda path: os.unlink(path / INDEX), f"{INDEX} is missing"),
    "half a manifest": (lambda path: os.truncate(path / MANIFEST, 9), f"{MANIFEST} cannot be read"),
    "a newer format": (_newer, "format 99, this version reads 2"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_refused_by_name_and_the_one_before_used(tmp_path: Path, damage: str) -> None:
    for step in (5, 10):
        save(tmp_path, step)
    break_it, message = DAMAGE[damage]
    break_it(tmp_path / "step-00000010")
    checkpoints = Checkpointer(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        checkpoints.open(tmp_path / "step-00000010")
    found, refused = checkpoints.newest()
    assert (found.step, found.path.name) == (5, "step-00000005")
    assert len(refused) == 1
    assert f"checkpoint {tmp_path}/step-00000010: {message}" in str(refused[0]) or message == "it is damaged"
    assert load(found.path) == 5
    save(tmp_path, 8, keep=1)  # must not be the one that is dropped
    assert "step-00000008" in names(tmp_path)


def test_only_damaged_checkpoints_is_an_error_and_none_is_not(tmp_path: Path) -> None:
    checkpoints = Checkpointer(tmp_path)
    assert checkpoints.newest(tmp_path / "absent") is None
    _flip(DATA)(save(tmp_path, 5))
    with pytest.raises(CheckpointError, match=r"no usable checkpoint in .*step-00000005.*damaged"):
        checkpoints.newest()
    with pytest.raises(CheckpointError, match="no such folder"):
        checkpoints.open(tmp_path / "step-00000009")


def test_a_model_of_another_shape_is_refused_by_the_name_of_the_tensor(tmp_path: Path) -> None:
    path = save(tmp_path, 5)
    found = Checkpointer(tmp_path).open(path)
    for model, message in [
        (made(0, width=9)[0], r"model.0.weight is \(4, 8\) there and \(4, 9\) in the model"),
        (nn.Sequential(*made(0)[0], nn.Linear(2, 2)), "it lacks model.2.bias and 1 more"),
        (made(0)[0][:1], "the model has no model.1.bias and 1 more"),
    ]:
        with pytest.raises(CheckpointError, match=f"{path}: {message}"):
            Checkpointer(tmp_path).load(found, model)
    frozen = made(0)[0]
    with pytest.raises(CheckpointError, match=f"{path}: the optimizer has no optimizer.1."):
        Checkpointer(tmp_path).load(found, frozen, torch.optim.AdamW(frozen[0].parameters()))


class Evil:
    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.trace}",)


@pytest.mark.parametrize("kind", ["torch file", "pickle"])
def test_a_pickle_among_the_tensors_is_refused_by_name_and_not_run(tmp_path: Path, kind: str) -> None:
    path, trace = save(tmp_path, 5), tmp_path / "ran"
    if kind == "torch file":
        torch.save({"weight": Evil(trace)}, path / DATA)
    else:
        (path / DATA).write_bytes(pickle.dumps(Evil(trace)))
    index = json.loads((path / INDEX).read_text())
    for entry in index.values():
        entry["chunks"][0][1:3] = [0, (path / DATA).stat().st_size]
    (path / INDEX).write_text(json.dumps(index))
    reseal(path)
    with pytest.raises(CheckpointError, match=f"{path}: {DATA} holds something other than tensors, which was not loaded"):
        load(path)
    assert not trace.exists()
    with (path / DATA).open("rb") as file:
        torch.load(file, weights_only=False) if kind == "torch file" else pickle.load(file)
    assert trace.exists(), "it would have run"


def test_a_pickled_index_is_never_looked_at(tmp_path: Path) -> None:
    path, trace = save(tmp_path, 5), tmp_path / "ran"
    (path / ".metadata").write_bytes(pickle.dumps(Evil(trace)))
    manifest = json.loads((path / MANIFEST).read_text())
    manifest["files"][".metadata"] = []
    (path / MANIFEST).write_text(json.dumps(manifest))
    reseal(path)
    assert load(path) == 5
    assert not trace.exists()
    os.rename(path / ".metadata", path / INDEX)
    reseal_without = json.loads((path / MANIFEST).read_text())
    del reseal_without["files"][".metadata"]
    (path / MANIFEST).write_text(json.dumps(reseal_without))
    reseal(path)
    with pytest.raises(CheckpointError, match=f"{path}: {INDEX} cannot be read"):
        load(path)
    assert not trace.exists()
    os.rename(path / INDEX, path / ".metadata")
    with pytest.raises(AttributeError):
        dcp.FileSystemReader(path).read_metadata()
    assert trace.exists(), "torch's own reader runs it"


def test_an_index_cannot_point_elsewhere(tmp_path: Path) -> None:
    path = save(tmp_path, 5)
    for where in (f"../step-00000005/{DATA}", str(path / DATA)):
        text = (path / INDEX).read_text()
        (path / INDEX).write_text(text.replace(DATA, where))
        reseal(path)
        with pytest.raises(CheckpointError, match="names files elsewhere"):
            load(path)
        (path / INDEX).write_text(text)


def test_names_do_not_know_of_wrappers(tmp_path: Path) -> None:
    """Compiling or recomputing a part changes nothing in the checkpoint."""
    plain, optimizer = made(3)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, plain, optimizer, {})
    wrapped = nn.Sequential(torch.compile(made(0)[0][0]), checkpoint_wrapper(made(0)[0][1]))
    assert "0._orig_mod.weight" in dict(wrapped.named_parameters())
    fresh = torch.optim.AdamW(wrapped.parameters(), fused=True)
    checkpoints.load(checkpoints.newest()[0], wrapped, fresh)
    assert all(map(torch.equal, wrapped.parameters(), plain.parameters()))
    assert torch.equal(fresh.state[wrapped[1].weight]["exp_avg"], optimizer.state[plain[1].weight]["exp_avg"])
    checkpoints.save(2, wrapped, fresh, {})
    checkpoints.close()
    index = [json.loads((tmp_path / f"step-0000000{step}" / INDEX).read_text()) for step in (1, 2)]
    assert index[0].keys() == index[1].keys()


def test_an_optimizer_that_has_not_stepped_is_not_made_to(tmp_path: Path) -> None:
    """torch's own way to ask such an optimizer for its state takes a step, which counts, and runs what hangs on steps."""

    def no_step(*_: object) -> None:
        pytest.fail("took a step")

    model = made(2)[0]
    model.zero_grad()  # with gradients it would not
    cold = torch.optim.AdamW(model.parameters(), fused=True)
    cold.register_step_pre_hook(no_step)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, model, cold, {})
    again = torch.optim.AdamW(model.parameters(), fused=True)
    hook = again.register_step_pre_hook(no_step)
    checkpoints.load(checkpoints.newest()[0], model, again)
    assert not any(again.state.values())
    hook.remove()
    model(torch.ones(1, 8)).sum().backward()
    again.step()
    assert {float(moments["step"]) for moments in again.state.values()} == {1.0}
    save(tmp_path, 2)
    warm = torch.optim.AdamW(model.parameters(), fused=True)
    warm.register_step_pre_hook(no_step)
    checkpoints.load(checkpoints.newest()[0], model, warm)
    assert {float(moments["step"]) for moments in warm.state.values()} == {1.0}


def test_what_a_router_had_gathered_is_void_after_loading(tmp_path: Path) -> None:
    router = Router(8, 4, 2, balancers="eqb")
    optimizer = torch.optim.AdamW(router.parameters())
    attach(router, optimizer)
    router(torch.randn(16, 8)).weights.sum().backward()
    optimizer.step()
    bias = {name: value.clone() for name, value in router.named_buffers()}
    assert any(value.any() for value in bias.values())
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, router, optimizer, {})
    router(torch.randn(16, 8))
    for value in router.buffers():
        value.fill_(9)
    checkpoints.load(checkpoints.newest()[0], router, optimizer)
    assert all(torch.equal(value, bias[name]) for name, value in router.named_buffers())
    gathered = [value for module in router.modules() if hasattr(module, "statistics") for value in module.statistics().values()]
    assert not any(value.any() for value in gathered if value.dtype == torch.int64)


def test_saving_goes_on_while_training_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, real = threading.Event(), checkpoint.write_shards
    monkeypatch.setattr(checkpoint, "write_shards", lambda *arguments: (go.wait(60), real(*arguments)))
    model, optimizer = made(5)
    extra = {"list": [1]}
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, model, optimizer, extra)
        assert names(tmp_path) == []
        with torch.no_grad():
            for value in (*model.parameters(), *optimizer.state[model[0].weight].values()):
                value.fill_(6)
        extra["list"].append(2)
        torch.rand(1)
        go.set()
        checkpoints.wait()
        found = checkpoints.newest()[0]
        assert found.extra == {"list": [1]}
        checkpoints.load(found, model, optimizer)
    assert model[0].weight[0, 0] == 5
    assert float(optimizer.state[model[0].weight]["step"]) == 1


def _full_disk(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """The files of this step go to a device that is full, so that it is the system who says no."""
    real = dcp.filesystem.FileSystem.create_stream

    @contextmanager
    def full(self: object, path: Path, mode: str) -> object:
        if f"step-{step:08d}" in str(path):
            path = Path("/dev/full")
        with real(self, path, mode) as stream:
            yield stream

    monkeypatch.setattr(dcp.filesystem.FileSystem, "create_stream", full)


def test_a_full_disk_is_told_by_what_comes_next_and_leaves_the_older_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 5)
    _full_disk(monkeypatch, 10)
    message = (
        f"checkpoint {tmp_path}/step-00000010: cannot be written: [Errno 28] No space left on device; "
        f"the newest checkpoint is {tmp_path}/step-00000005"
    )
    for then in ("wait", "close", "save"):
        checkpoints = Checkpointer(tmp_path)
        checkpoints.save(10, *made(10), {})
        with pytest.raises(CheckpointError) as caught:
            checkpoints.save(11, *made(11), {}) if then == "save" else getattr(checkpoints, then)()
        assert str(caught.value) == message
        checkpoints.wait()  # said once
        assert os.listdir(tmp_path) == ["step-00000005"], "nothing half-written stays on a full disk"
    assert load(tmp_path / "step-00000005") == 5
    checkpoints.save(12, *made(12), {})
    checkpoints.close()
    assert load(tmp_path / "step-00000012") == 12

    def fails() -> None:
        with checkpoints:
            checkpoints.save(10, *made(10), {})
            raise KeyError("what ended the work")

    with pytest.raises(KeyError, match="what ended the work"):
        fails()


def test_the_system_s_reason_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch hides it behind an error of its own where it comes in the middle of a tensor."""

    class Full(io.BytesIO):
        def write(self, content: bytes) -> int:
            if len(content) > 1000:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(content)

    monkeypatch.setattr(dcp.filesystem.FileSystem, "create_stream", lambda *_: Full())
    with pytest.raises(RankError, match=r"^\[Errno 28\] No space left on device$"):
        write_shards(tmp_path, {"x": torch.zeros(10_000)}, Ranks())


def save_and_die(folder: Path, moment: str, step: int) -> None:
    def die(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def then_die(function: Callable[..., object]) -> Callable[..., None]:
        def wrapped(*args: object) -> None:
            function(*args)
            die()

        return wrapped

    def half_a_file(tensor: torch.Tensor, stream: BinaryIO) -> None:
        stream.write(b"PK half of a file")
        die()

    def die_at(function: Callable[..., object], name: str, argument: int, there: bool) -> Callable[..., object]:
        def wrapped(*args: Path, **options: object) -> object:
            if Path(args[argument]).name == name and Path(args[argument]).exists() == there:
                die()
            return function(*args, **options)

        return wrapped

    name = f"step-{step:08d}"
    match moment:
        case "tensors half written":
            torch.save = half_a_file
        case "tensors written":
            checkpoint.write_shards = then_die(checkpoint.write_shards)
        case "manifest written":
            checkpoint.publish_folder = die
        case "before the rename" | "between the two renames":
            os.rename = die_at(os.rename, name, 1, False)
        case "after the rename":
            files.sync_folder = lambda path: die() if (path / name).exists() else None
        case "while dropping old ones":
            shutil.rmtree = die_at(shutil.rmtree, ".step-00000005.dropped", 0, True)
        case "while dropping the replaced one":
            shutil.rmtree = die_at(shutil.rmtree, f".{name}.old", 0, True)
    save(folder, step, value=15)


@pytest.mark.parametrize(
    ("moment", "step", "newest", "weight"),
    [
        ("tensors half written", 15, 10, 10),
        ("tensors written", 15, 10, 10),
        ("manifest written", 15, 10, 10),
        ("before the rename", 15, 10, 10),
        ("after the rename", 15, 15, 15),
        ("while dropping old ones", 15, 15, 15),
        ("between the two renames", 10, 10, 10),
        ("while dropping the replaced one", 10, 10, 15),
    ],
)
def test_a_kill_during_a_save_loses_nothing(tmp_path: Path, moment: str, step: int, newest: int, weight: int) -> None:
    for older in (5, 10):
        save(tmp_path, older)
    process = multiprocessing.get_context("fork").Process(target=save_and_die, args=(tmp_path, moment, step))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    found, refused = Checkpointer(tmp_path).newest()
    assert (found.step, load(found.path), refused) == (newest, weight, [])
    save(tmp_path, 20)
    assert [name for name in os.listdir(tmp_path) if name.startswith(".step")] == [], "leftovers are cleared by the next save"
    assert Checkpointer(tmp_path).newest()[0].step == 20


def draw() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.gauss(0, 1), float(np.random.randn())  # noqa: NPY002


def test_random_generators_continue(tmp_path: Path) -> None:
    draw()  # Gaussians come in pairs: the second one is kept aside
    saved = rng_state()
    path = save(tmp_path, 1)
    restore_rng(saved)
    first = [draw(), draw()]
    restore_rng(saved)
    assert [draw(), draw()] == first
    restore_rng(saved)
    model, optimizer = made(1)
    with Checkpointer(tmp_path) as checkpoints:
        restore_rng(saved)
        checkpoints.save(2, model, optimizer, {})
    draw()
    checkpoints.load(read_manifest(path.with_name("step-00000002")), model, optimizer)
    assert [draw(), draw()] == first
