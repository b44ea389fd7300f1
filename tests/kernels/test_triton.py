"""The Triton kernels, in processes of their own: in the interpreter, compiled for GPUs that are not here, on one that is.

The interpreter replaces the compiler when triton is imported, and EVENLOAD_KERNELS is read when evenload is.
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed here; on Linux x86_64 the extra `test` brings it", allow_module_level=True)


def run(*arguments: str, **variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "EVENLOAD_KERNELS")}
    done = subprocess.run(
        [sys.executable, "-P", "-m", *arguments], env=environment | variables, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-5000:]
    return done.stdout


def against_twins(**variables: str) -> None:
    out = run("pytest", "-q", "-p", "no:cacheprovider", "tests/kernels/against_twins", EVENLOAD_KERNELS="triton", **variables)
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|skipped|deselected)", out)}
    assert counts.get("passed", 0) >= 100, out
    assert counts.keys() == {"passed"}, out


def test_kernels_equal_their_twins_in_the_interpreter():
    against_twins(TRITON_INTERPRET="1")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: kernels run in the interpreter only")
def test_kernels_equal_their_twins_on_this_gpu():
    against_twins()


def test_every_kernel_compiles_ahead_of_time_without_spills(capsys):
    out = run("evenload.kernels.aot")
    with capsys.disabled():
        print(f"\n{out}")
    rows = re.findall(r"(\w+_kernel) +(sm_\d+|gfx\w+) +(\d+) +(\d+) +(\d+) +[\d.]+\n", out)
    kernels = {kernel for kernel, *_ in rows}
    written = re.findall(r"^def (\w+_kernel)\(", "".join(p.read_text() for p in (ROOT / "kernels").glob("*_triton.py")), re.M)
    assert kernels == set(written)
    for kernel in kernels:
        assert {target for name, target, *_ in rows if name == kernel} == {"sm_80", "sm_90", "sm_100", "gfx942"}
    assert all(int(spills) == 0 and int(registers) > 0 for _, _, registers, spills, _ in rows)
