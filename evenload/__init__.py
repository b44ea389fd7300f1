"""evenload: balanced mixture-of-experts routing for people who pretrain MoE models."""

from . import balancers
from ._version import __version__
from .balancers import *  # noqa: F403
from .balancers import __all__ as _balancers_all

__all__ = ["__version__", "balancers", *_balancers_all]
