"""All mutants."""

from __future__ import annotations

from tests.mutants.delivery import DELIVERY
from tests.mutants.limits import LIMITS
from tests.mutants.sampling import SAMPLING
from tests.mutants.scheduling import SCHEDULING

MUTANTS = (*DELIVERY, *SCHEDULING, *SAMPLING, *LIMITS)
