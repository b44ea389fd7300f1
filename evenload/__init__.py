"""evenload: balanced mixture-of-experts routing for people who pretrain MoE models.

The public names are those of `evenload.balancers`, imported when first used: `evenload --help` need not wait for torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from ._version import __version__ as __version__

if TYPE_CHECKING:
    from .balancers import *  # noqa: F403


def __getattr__(name: str) -> Any:
    if name.startswith("__") and name != "__all__":
        raise AttributeError(name)
    balancers = importlib.import_module(".balancers", __name__)
    if name == "balancers":
        return balancers
    if name == "__all__":
        return ["__version__", "balancers", *balancers.__all__]
    if name not in balancers.__all__:
        raise AttributeError(f"module 'evenload' has no attribute {name!r}; it has {', '.join(balancers.__all__)}")
    return getattr(balancers, name)


def __dir__() -> list[str]:
    return list(__getattr__("__all__"))
