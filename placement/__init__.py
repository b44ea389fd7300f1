"""Where experts live and when they run, starting from what a run really demands of them: see `trace`."""

from .trace import Demand, record_demand

__all__ = ["Demand", "record_demand"]
