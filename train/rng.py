"""The state of every random generator of this process, as tensors."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor


def rng_state() -> dict[str, Tensor]:
    """uint8 tensors on the CPU: `torch`, `cuda.0` ... of each device, and `host` (Python's and NumPy's, as JSON)."""
    name, keys, position, has_gauss, gauss = np.random.get_state()  # noqa: NPY002  (the global generator is the point)
    numpy = [str(name), np.asarray(keys).tolist(), int(position), int(has_gauss), float(gauss)]
    host = json.dumps({"python": random.getstate(), "numpy": numpy}).encode()
    state = {"torch": torch.get_rng_state(), "host": torch.frombuffer(bytearray(host), dtype=torch.uint8)}
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return state | {f"cuda.{index}": device for index, device in enumerate(devices)}


def restore_rng(state: Mapping[str, Tensor]) -> None:
    """Continue from a `rng_state`; GPUs only where there are as many as then."""
    torch.set_rng_state(state["torch"])
    devices = [state[f"cuda.{index}"] for index in range(len(state) - 2)]
    if torch.cuda.is_available() and len(devices) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(devices)
    host = json.loads(bytes(state["host"].numpy()))
    version, internal, gauss = host["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = host["numpy"]
    np.random.set_state((name, np.asarray(keys, dtype=np.uint32), *rest))  # noqa: NPY002
