"""The house itself: what is in the wheel, what an import loads, and which room may know which."""

import ast
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = ["kernels", "balancers", "models", "placement", "train"]  # a room may import from those before it


def packages() -> list[str]:
    return sorted(path.parent.name for path in ROOT.glob("*/__init__.py"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> set[str]:
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "-w", str(folder), str(ROOT)], check=True, capture_output=True, cwd=folder)
    [path] = folder.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        return set(archive.namelist())


def test_every_package_folder_is_in_the_wheel(wheel):
    assert {"balancers", "configs", "evenload", "kernels", "models", "train"} <= set(packages())
    for package in packages():
        inside = "evenload" if package == "evenload" else f"evenload/{package}"
        for path in (ROOT / package).rglob("*"):
            if path.suffix in (".py", ".yaml") or path.name == "py.typed":
                assert f"{inside}/{path.relative_to(ROOT / package).as_posix()}" in wheel
        assert f"{inside}/py.typed" in wheel


def test_nothing_but_evenload_lands_in_site_packages(wheel):
    assert {name.split("/")[0].split("-")[0] for name in wheel} == {"evenload"}


def test_importing_the_balancers_loads_torch_alone():
    heavy = ["triton", "transformers", "datasets", "omegaconf", "tensorboard", "tokenizers", "matplotlib"]
    heavy += ["evenload.train", "evenload.models"]
    program = f"import sys, evenload.balancers; print([name for name in {heavy!r} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-P", "-c", program], check=True, capture_output=True, text=True, cwd=ROOT)
    assert found.stdout.strip() == "[]"


def test_importing_the_models_does_not_load_transformers():
    program = (
        "import sys, evenload.models; print([name for name in ('transformers', 'evenload.models.hf') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-P", "-c", program], check=True, capture_output=True, text=True, cwd=ROOT)
    assert found.stdout.strip() == "[]"


def test_imports_run_downwards():
    for level, room in enumerate(LAYERS):
        for path in (ROOT / room).rglob("*.py"):
            to_root = len(path.relative_to(ROOT).parts)  # dots that lead to evenload
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom) and node.level == to_root and node.module:
                    target = node.module.split(".")[0]
                    if target in LAYERS:
                        assert LAYERS.index(target) < level, f"{path.relative_to(ROOT)} imports from {target}"
                if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                    assert not node.module.startswith("evenload"), f"{path.relative_to(ROOT)}: relative imports inside"


def test_a_configuration_named_on_the_command_line_is_packaged():
    assert (ROOT / "configs" / "tiny.yaml").is_file()
