"""These tests run the Triton kernels, in a process of their own: tests/kernels/test_triton.py starts it."""

import os

import pytest
import torch

if os.environ.get("EVENLOAD_KERNELS") != "triton":
    collect_ignore_glob = ["test_*.py"]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(scope="session", autouse=True)
def device():
    """Tensors are made on the CPU for the interpreter, and on the GPU without it."""
    name = "cpu" if INTERPRETED else "cuda"
    with torch.device(name):
        yield torch.device(name)
