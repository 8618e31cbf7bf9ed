"""Planning for TPUs without one: compiles for their topologies ahead of time, and estimates what fits."""

from __future__ import annotations

from penstock.engine.planning.compiling import ALL_OPTIONS, Bucket
from penstock.engine.planning.models import planned_model
from penstock.engine.planning.plan import Plan, plan
from penstock.engine.planning.presets import PRESETS, preset
from penstock.engine.planning.report import as_dict
from penstock.engine.planning.topology import has_libtpu

__all__ = [
    "ALL_OPTIONS",
    "PRESETS",
    "Bucket",
    "Plan",
    "as_dict",
    "has_libtpu",
    "plan",
    "planned_model",
    "preset",
]
