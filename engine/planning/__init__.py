"""Planning for TPUs without one: compiles for their topologies ahead of time, and says what fits and how fast it is."""

from __future__ import annotations

from penstock.engine.planning.compiling import ALL_OPTIONS, Bucket
from penstock.engine.planning.models import planned_model
from penstock.engine.planning.plan import Plan, plan
from penstock.engine.planning.planned_steps import planned_replicas
from penstock.engine.planning.presets import PRESETS, preset
from penstock.engine.planning.report import as_dict
from penstock.engine.planning.simulation import Simulated, simulate
from penstock.engine.planning.topology import has_libtpu
from penstock.engine.planning.traces import Trace, read_trace

__all__ = [
    "ALL_OPTIONS",
    "PRESETS",
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
