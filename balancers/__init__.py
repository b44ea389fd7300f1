"""Routers and balancers for mixture-of-experts models.

    router = Router(d_model, num_experts, top_k, balancers="eqb+lei")
    routing = router(x)          # .indices, .weights, .counts
    ...
    balance_step(model)          # once per optimizer step

Needs torch and nothing else.
"""

from . import metrics
from .anchor import anchor_loss
from .balancer import Balancer, Injection
from .exact_quantile import ExactQuantile
from .gshard import GShardLoss
from .histogram_quantile import HistogramQuantile
from .load_error import LoadErrorInjection
from .loss_free import LossFree
from .order_statistic import global_order_statistic
from .phi import PhiBalancing
from .registry import BALANCERS, make_balancers
from .report import BalanceReport
from .router import Router, routers
from .routing import Routing, route
from .shard_quantile import ShardQuantile
from .sinkhorn import Sinkhorn
from .step import Attachment, attach, balance_step, discard_step
from .uniform import ForcedUniform
from .z_loss import ZLoss

__all__ = [
    "BALANCERS",
    "Attachment",
    "BalanceReport",
    "Balancer",
    "ExactQuantile",
    "ForcedUniform",
    "GShardLoss",
    "HistogramQuantile",
    "Injection",
    "LoadErrorInjection",
    "LossFree",
    "PhiBalancing",
    "Router",
    "Routing",
    "ShardQuantile",
    "Sinkhorn",
    "ZLoss",
    "anchor_loss",
    "attach",
    "balance_step",
    "discard_step",
    "global_order_statistic",
    "make_balancers",
    "metrics",
    "route",
    "routers",
]
