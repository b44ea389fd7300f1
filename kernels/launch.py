"""What every launch needs to know of sizes and devices."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

INTERPRETED_PROGRAMS = 3  # few, since each costs Python time; more than one, so that the loops over tiles are walked


def pow2(size: int) -> int:
    """The smallest power of two that is not below `size`."""
    return 1 << (size - 1).bit_length() if size > 1 else 1


def programs(tiles: int, device: torch.device, per_core: int = 8) -> int:
    """How many programs share `tiles` tiles: enough to fill the device, so that partial sums stay few. At least 1."""
    if device.type == "cpu":
        return max(1, min(tiles, INTERPRETED_PROGRAMS))
    return max(1, min(tiles, per_core * torch.cuda.get_device_properties(device).multi_processor_count))


def on_device(tensor: Tensor) -> AbstractContextManager[object]:
    """Kernels are launched on the current device, which need not be the tensor's."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
