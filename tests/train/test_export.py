import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from evenload.train import Trainer, cli, export, load_config
from evenload.train.export import load_exported


@pytest.fixture(scope="module")
def trained(mini: str, tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """Two checkpoints, of steps 1 and 2."""
    out = tmp_path_factory.mktemp("export") / "run"
    trainer = Trainer(load_config(mini, [f"run.out={out}", "run.steps=2", "run.save_every=1"]), say=lambda _: None)
    trainer.run()
    return trainer


@pytest.fixture
def run(trained: Trainer, tmp_path: Path) -> Path:
    return shutil.copytree(trained.folder, tmp_path / "run")


def test_a_run_becomes_a_file_that_becomes_the_model(trained: Trainer, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["export", str(run), "safetensors"]) == 0
    folder = run / "export" / "safetensors-step-00000002"
    assert capsys.readouterr().out == f"{folder}\n"
    assert sorted(os.listdir(folder)) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (folder / "tokenizer.json").read_bytes() == (run / "tokenizer.json").read_bytes()
    assert json.loads((folder / "config.json").read_text()) == trained.config.to_dict()
    with safe_open(folder / "model.safetensors", "pt") as file:
        about = file.metadata()
    assert (about["step"], json.loads(about["config"])) == ("2", trained.config.to_dict())
    for path in (folder, folder / "model.safetensors"):
        state = load_exported(path).state_dict()
        assert state.keys() == trained.model.state_dict().keys()
        assert all(torch.equal(value, state[name]) for name, value in trained.model.state_dict().items())
    assert any(name.endswith("eqb.bias") and value.any() for name, value in state.items())


def test_one_checkpoint_to_a_folder_of_choice(run: Path, tmp_path: Path) -> None:
    step = run / "checkpoints" / "step-00000001"
    assert cli.main(["export", str(step), "safetensors", f"out={tmp_path}/model"]) == 0
    with safe_open(tmp_path / "model" / "model.safetensors", "pt") as file:
        assert file.metadata()["step"] == "1"
    assert (tmp_path / "model" / "tokenizer.json").exists()


def test_a_damaged_checkpoint_is_named_and_the_one_before_exported(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.truncate(run / "checkpoints/step-00000002/__0_0.distcp", 1000)
    assert cli.main(["export", str(run), "safetensors"]) == 0
    refused, folder = capsys.readouterr().out.splitlines()
    assert refused.startswith(f"refused checkpoint {run}/checkpoints/step-00000002: __0_0.distcp has 1000 bytes instead of")
    assert folder.endswith("safetensors-step-00000001")
    assert cli.main(["export", str(run / "checkpoints/step-00000002"), "safetensors"]) == 2
    assert "step-00000002: __0_0.distcp has 1000 bytes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{run}", "gguf"], "export: unknown format 'gguf'; formats: safetensors"),
        (["{run}", "safetensors", "into=here"], "export: 'into=here': write it as out=PATH"),
        (["{run}", "safetensors", "out={run}"], "export: {run} exists; remove it or choose another out=PATH"),
        (["{run}/tensorboard", "safetensors"], "export: {run}/tensorboard holds no checkpoint"),
        (["/nowhere", "safetensors"], "export: /nowhere holds no checkpoint"),
        (["{run}", "safetensors", "out=/proc/model"], "export: /proc/model cannot be written: [Errno"),
    ],
)
def test_what_cannot_be_exported_is_said_in_one_line(
    run: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(run.rglob("*"))
    assert cli.main(["export", *(word.format(run=run) for word in arguments)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"evenload: error: {message.format(run=run)}")
    assert error.count("\n") == 1
    assert sorted(run.rglob("*")) == before


def test_what_is_not_read_back_is_not_an_export(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import safetensors.torch

    def with_a_flipped_bit(tensors: dict[str, torch.Tensor], path: Path, about: dict[str, str]) -> None:
        real(tensors, path, about)
        content = bytearray(path.read_bytes())
        content[-9] ^= 1
        path.write_bytes(content)

    real = safetensors.torch.save_file
    monkeypatch.setattr(safetensors.torch, "save_file", with_a_flipped_bit)
    with pytest.raises(ValueError, match=r"model.safetensors does not hold what was written to it"):
        export.export(run, "safetensors")
    assert list((run / "export").iterdir()) == []


def test_other_files_are_not_models(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\x80\x04junk")
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ValueError, match="is not a model of `evenload export RUN safetensors`"):
            load_exported(path)
