"""Sweeps the queue regularly, to do what waiting entries need even while no worker has room."""

from __future__ import annotations

import asyncio
import random

from penstock.serving.readiness import Readiness
from penstock.worker.intake.intake import Intake
from penstock.worker.redis import retries

SWEEP_INTERVAL_S = 0.5


async def sweep_forever(intake: Intake, readiness: Readiness) -> None:
    """Sweeps at jittered intervals, so that workers take turns: an entry that one has swept is gone for the others."""
    while True:
        await asyncio.sleep(SWEEP_INTERVAL_S * random.uniform(0.75, 1.25))
        await retries.survive(intake.sweep(), "sweeper", readiness)
