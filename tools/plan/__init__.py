"""Planning for TPUs without one: compiles for their topologies ahead of time, and says what fits and how fast it is."""

from __future__ import annotations

from penstock.tools.plan.device.compiling import ALL_OPTIONS, Bucket
from penstock.tools.plan.device.published import PUBLISHED
from penstock.tools.plan.device.topology import has_libtpu
from penstock.tools.plan.models import planned_model
from penstock.tools.plan.plan import Plan, plan
from penstock.tools.plan.planned_steps import planned_replicas
from penstock.tools.plan.presets import PRESETS, preset
from penstock.tools.plan.report import as_dict
from penstock.tools.plan.simulation import Simulated, simulate
from penstock.tools.plan.traces import Trace, read_trace

__all__ = [
    "ALL_OPTIONS",
    "PRESETS",
    "PUBLISHED",
    "Bucket",
    "Plan",
    "Simulated",
    "Trace",
    "as_dict",
    "has_libtpu",
    "plan",
    "planned_model",
    "planned_replicas",
    "preset",
    "read_trace",
    "simulate",
]
