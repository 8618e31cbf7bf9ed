"""The schedules that libtpu makes of Pallas kernels: read from its dumps, counted, and followed for given tables."""

from penstock.tools.plan.schedules.bundles import ScheduleError
from penstock.tools.plan.schedules.dumps import compiled_schedules
from penstock.tools.plan.schedules.schedule import Execution, Loop, Schedule

__all__ = ["Execution", "Loop", "Schedule", "ScheduleError", "compiled_schedules"]
