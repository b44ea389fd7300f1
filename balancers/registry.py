"""Balancers by name: what configurations and the command line write."""

import difflib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from .balancer import Balancer
from .exact_quantile import ExactQuantile
from .gshard import GShardLoss
from .histogram_quantile import HistogramQuantile
from .load_error import LoadErrorInjection
from .loss_free import LossFree
from .phi import PhiBalancing
from .shard_quantile import ShardQuantile
from .sinkhorn import Sinkhorn
from .uniform import ForcedUniform
from .z_loss import ZLoss

BALANCERS: dict[str, type[Balancer]] = {
    balancer.name: balancer
    for balancer in (
        GShardLoss,
        LossFree,
        ShardQuantile,
        HistogramQuantile,
        ExactQuantile,
        LoadErrorInjection,
        PhiBalancing,
        ZLoss,
        Sinkhorn,
        ForcedUniform,
    )
}
"""Every balancer by the name that a configuration gives it."""


def make_balancers(spec: Any = ()) -> list[Balancer]:
    """New balancers from "eqb+lei", from [{"name": "eqb"}, {"name": "lei", "coeff": 0.03}], or from a mix of names, dicts,
    Balancer classes and instances. "none", None and () mean no balancer.

    Raises:
        ValueError: an unknown name or option (with the known ones), a value out of range, or the same balancer twice.
    """
    if spec is None:
        return []
    if isinstance(spec, str):
        spec = [name.strip() for name in spec.split("+")]
    elif isinstance(spec, Balancer | Mapping | type) or not isinstance(spec, Iterable):
        spec = [spec]
    balancers = [balancer for item in spec if (balancer := _make_one(item)) is not None]
    names = [balancer.name for balancer in balancers]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"balancer {name!r} is listed {names.count(name)} times; keep one and set its coefficient")
    return balancers


def _make_one(item: Any) -> Balancer | None:
    if isinstance(item, Balancer):
        return item
    if isinstance(item, type) and issubclass(item, Balancer):
        return item()
    if isinstance(item, str):
        item = {"name": item}
    if not isinstance(item, Mapping) or "name" not in item:
        raise ValueError(f"balancer {item!r}; give a name, {{'name': ..., option: ...}}, a Balancer class or an instance")
    name = str(item["name"])
    if name == "none":
        return None
    if name not in BALANCERS:
        known = ["none", *BALANCERS]
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(f"unknown balancer {name!r}; {hint}known: {', '.join(known)}")
    options = {str(key): _plain(value) for key, value in item.items() if key != "name"}
    accepted = list(inspect.signature(BALANCERS[name]).parameters)
    for option in options:
        if option not in accepted:
            raise ValueError(f"balancer {name!r} has no option {option!r}; it takes {', '.join(accepted) or 'none'}")
    return BALANCERS[name](**options)


def _plain(value: Any) -> Any:
    """Lists from a YAML file are what a caller would write as a tuple: potential: [lp, 3]."""
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, str | Mapping) else value
