import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from evenload.train.checkpoint import (
    MANIFEST,
    STATE,
    CheckpointError,
    list_checkpoints,
    load_checkpoint,
    load_newest,
    restore_rng,
    rng_state,
    save_checkpoint,
)


def state(step: int) -> dict[str, object]:
    return {"weight": torch.full((64,), float(step)), "counters": {"step": step}}


def names(folder: Path) -> list[str]:
    return [path.name for path in list_checkpoints(folder)]


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 7, state(7), keep_last=2)
    loaded = load_checkpoint(path)
    assert torch.equal(loaded["weight"], state(7)["weight"])
    assert loaded["counters"] == {"step": 7}
    assert sorted(os.listdir(tmp_path)) == ["step-00000007"]


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_only_the_newest_are_kept(tmp_path: Path, keep: int) -> None:
    for step in (5, 10, 99_999_999, 100_000_000):
        save_checkpoint(tmp_path, step, state(step), keep)
    expected = ["step-00000005", "step-00000010", "step-99999999", "step-100000000"]
    assert names(tmp_path) == expected[-keep:]


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 5, state(1), 1)
    save_checkpoint(tmp_path, 5, state(2), 1)
    assert float(load_checkpoint(tmp_path / "step-00000005")["weight"][0]) == 2


def _flip(path: Path) -> None:
    content = bytearray((path / STATE).read_bytes())
    content[len(content) // 2] ^= 1
    (path / STATE).write_bytes(content)


DAMAGE = {
    "one bit": (_flip, "state.pt is damaged"),
    "cut short": (lambda path: os.truncate(path / STATE, 100), "state.pt is damaged"),
    "no manifest": (lambda path: os.unlink(path / MANIFEST), "cannot be read"),
    "no state": (lambda path: os.unlink(path / STATE), "cannot be read"),
    "half a manifest": (lambda path: os.truncate(path / MANIFEST, 9), "cannot be read"),
    "another format": (lambda path: (path / MANIFEST).write_text(json.dumps({"format": 99})), "format 99"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_refused_by_name_and_the_one_before_used(tmp_path: Path, damage: str) -> None:
    for step in (5, 10):
        save_checkpoint(tmp_path, step, state(step), 2)
    break_it, message = DAMAGE[damage]
    break_it(tmp_path / "step-00000010")
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(tmp_path / "step-00000010")
    loaded, path, refused = load_newest(tmp_path)
    assert (loaded["counters"]["step"], path.name) == (5, "step-00000005")
    assert "step-00000010" in str(refused[0])
    save_checkpoint(tmp_path, 8, state(8), 1)  # must not be the one that is dropped
    assert "step-00000008" in names(tmp_path)


def test_only_damaged_checkpoints_is_an_error_and_none_is_not(tmp_path: Path) -> None:
    assert load_newest(tmp_path / "absent") is None
    _flip(save_checkpoint(tmp_path, 5, state(5), 2))
    with pytest.raises(CheckpointError, match=r"no usable checkpoint in .*step-00000005.*damaged"):
        load_newest(tmp_path)
    with pytest.raises(CheckpointError, match="no such folder"):
        load_checkpoint(tmp_path / "step-00000009")


def test_loading_never_runs_code(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, (f"touch {tmp_path}/ran",)

    path = save_checkpoint(tmp_path, 5, {"weight": Evil()}, 2)
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_checkpoint(path)
    assert not (tmp_path / "ran").exists()


KILLER = """
    import os, signal, sys
    from pathlib import Path
    import torch
    from evenload.train import checkpoint, files

    def die(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGKILL)

    def then_die(function):
        def wrapped(*args, **kwargs):
            function(*args, **kwargs)
            die()
        return wrapped

    def half_a_file(state, path):
        Path(path).write_bytes(b"PK half of a file")
        die()

    def die_at(function, name, argument, there):
        def wrapped(*args, **kwargs):
            if Path(args[argument]).name == name and Path(args[argument]).exists() == there:
                die()
            return function(*args, **kwargs)
        return wrapped

    moment, step = sys.argv[2], int(sys.argv[3])
    name = f"step-{step:08d}"
    if moment == "state half written": torch.save = half_a_file
    if moment == "state written": torch.save = then_die(torch.save)
    if moment in ("before the rename", "between the two renames"): os.rename = die_at(os.rename, name, 1, False)
    if moment == "after the rename": files.sync_folder = lambda path: die() if (path / name).exists() else None
    if moment == "while dropping old ones": files.shutil.rmtree = die_at(files.shutil.rmtree, ".step-00000005.dropped", 0, True)
    if moment == "while dropping the replaced one": files.shutil.rmtree = die_at(files.shutil.rmtree, f".{name}.old", 0, True)
    checkpoint.save_checkpoint(Path(sys.argv[1]), step, {"weight": torch.full((64,), 15.0), "counters": {"step": step}}, 2)
"""


@pytest.mark.parametrize(
    ("moment", "step", "newest", "weight"),
    [
        ("state half written", 15, 10, 10),
        ("state written", 15, 10, 10),
        ("before the rename", 15, 10, 10),
        ("after the rename", 15, 15, 15),
        ("while dropping old ones", 15, 15, 15),
        ("between the two renames", 10, 10, 10),
        ("while dropping the replaced one", 10, 10, 15),
    ],
)
def test_a_kill_during_a_save_loses_nothing(tmp_path: Path, moment: str, step: int, newest: int, weight: int) -> None:
    for older in (5, 10):
        save_checkpoint(tmp_path, older, state(older), 2)
    script = [sys.executable, "-c", textwrap.dedent(KILLER), str(tmp_path), moment, str(step)]
    killed = subprocess.run(script, check=False)
    assert killed.returncode == -signal.SIGKILL
    loaded, _, refused = load_newest(tmp_path)
    assert (loaded["counters"]["step"], float(loaded["weight"][0]), refused) == (newest, weight, [])
    save_checkpoint(tmp_path, 20, state(20), 2)
    assert [name for name in os.listdir(tmp_path) if name.startswith(".step")] == [], "leftovers are cleared by the next save"
    assert load_newest(tmp_path)[0]["counters"]["step"] == 20


def test_random_generators_continue() -> None:
    import random

    import numpy as np

    def draw() -> tuple[float, float, float]:
        return torch.rand(()).item(), random.random(), float(np.random.rand())  # noqa: NPY002

    saved = rng_state()
    first = draw()
    restore_rng(saved)
    assert draw() == first
