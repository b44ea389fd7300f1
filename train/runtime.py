"""Device, precision and allocator of this process."""

from __future__ import annotations

import ctypes
import random

import numpy as np
import torch

from ..models import GPTConfig
from ..models.experts import grouped_obstacle
from .errors import ConfigError

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
KEEP_BYTES = 1 << 30


def choose_device(wanted: str, local_rank: int | None = None) -> torch.device:
    """`auto` is the GPU where there is one; a numbered GPU becomes torch's current one. Raises ConfigError for a device that
    is not there.

    Args:
        local_rank: picks the GPU where several ranks share a machine.
    """
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if local_rank is not None and wanted.startswith("cuda:"):
        raise ConfigError(f"run.device = {wanted!r}: every rank has a GPU of its own; use auto, cuda or cpu")
    if local_rank is not None and wanted == "cuda":
        wanted = f"cuda:{local_rank}"
    try:
        device = torch.device(wanted)
    except RuntimeError as error:
        raise ConfigError(f"run.device = {wanted!r}: use auto, cpu, cuda or cuda:<number>") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"run.device = {wanted!r}: use auto, cpu, cuda or cuda:<number>")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"run.device = {wanted!r}: torch sees {torch.cuda.device_count()} CUDA devices here")
    if device.index is not None and device.type == "cuda":
        torch.cuda.set_device(device)  # what libraries allocate without asking would land on the first one
    return device


def choose_autocast(precision: str, device: torch.device) -> torch.dtype | None:
    """The dtype of autocast, None for fp32. Parameters, optimizer and gates are fp32 either way.

    ``auto`` keeps fp32 on CPUs, most of which compute bf16 several times more slowly.
    """
    if precision == "auto":
        native = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        precision = "bf16" if native else "fp32"
    return torch.bfloat16 if precision == "bf16" else None


def check_expert_compute(model: GPTConfig, device: torch.device, autocast: torch.dtype | None) -> None:
    """Raise ConfigError where the grouped experts that were asked for cannot run, before any data is prepared."""
    row = torch.empty(1, model.d_model, dtype=autocast or torch.float32, device=device)
    experts, width, hidden = model.num_experts, model.d_model, model.expert_hidden
    weights = [torch.empty(shape, device="meta") for shape in ((experts, 2 * hidden, width), (experts, width, hidden))]
    if model.expert_compute == "grouped" and (obstacle := grouped_obstacle(row, *weights)):
        raise ConfigError(f'model.expert_compute = "grouped": {obstacle}; use auto or loop')


def seed_everything(seed: int) -> None:
    """Seed torch, Python and numpy. The order of the data has its own seed and draws from none of them."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002  (the global generator is the point)


def tune_allocator() -> None:
    """Let glibc keep freed blocks instead of returning each to the kernel: a CPU step frees and takes the same megabytes
    over and over, and fresh pages cost a fault each. Does nothing on other C libraries."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    mallopt(M_MMAP_THRESHOLD, KEEP_BYTES)
    mallopt(M_TRIM_THRESHOLD, KEEP_BYTES)
