"""Which implementation runs: Triton on CUDA and ROCm tensors where triton is installed, the torch definition elsewhere.

The environment variable EVENLOAD_KERNELS, read once when evenload is imported, overrides that: "torch" forces the
definition everywhere (is a kernel to blame?), "triton" forces the kernels, on CPU tensors too, where they need
TRITON_INTERPRET=1 (how the tests run them).
"""

import importlib.util
import os

import torch
from torch import Tensor

CHOICE = os.environ.get("EVENLOAD_KERNELS", "auto")
INSTALLED = importlib.util.find_spec("triton") is not None

if CHOICE not in ("auto", "torch", "triton"):
    raise ValueError(f"EVENLOAD_KERNELS={CHOICE!r}; choose auto, torch or triton")
if CHOICE == "triton" and not INSTALLED:
    raise ValueError('EVENLOAD_KERNELS="triton", but triton is not installed; pip install triton, or choose auto')


def uses_triton(*tensors: Tensor) -> bool:
    """Whether the Triton kernels take these tensors. float64 always goes to the definition: it is there to check gradients."""
    wanted = CHOICE == "triton" or (CHOICE == "auto" and INSTALLED and tensors[0].is_cuda)
    return wanted and all(tensor.dtype != torch.float64 for tensor in tensors)
