"""Draws the traffic of a large service: heavy-tailed tenants and lengths, bursts, priorities, shared beginnings."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

INTERACTIVE, USUAL, BATCH = 5, 0, -5
BURSTING = range(10, 20)  # tenants, ranked by their usual load
NO_HOME = -1


@dataclass(frozen=True, slots=True)
class Size:
    """Size of a service."""

    workers: int = 10_000
    slots: int = 8
    tenants: int = 100_000
    per_day: float = 100e6
    seconds: float = 300.0  # that are played
    burst_s: tuple[float, float] = (120.0, 180.0)
    burst: float = 1.5  # extra load of a few tenants, over the usual rate
    token_s: float = 0.05  # per token of a reply
    prompt_token_s: float = 0.0002
    prompt_tokens: float = 600.0  # on average
    output_tokens: float = 900.0
    beginnings: int = 3  # different beginnings of a tenant's prompts, at most
    held: int = 16  # beginnings that a worker holds
    shared: float = 0.7  # share of a prompt that begins like others

    @property
    def per_s(self) -> float:
        return self.per_day / 86_400


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests in order of arrival; an index of each list is one request."""

    at_s: list[float]
    tenant: list[int]  # 0 is the heaviest
    priority: list[int]
    prompt: list[int]
    output: list[int]
    beginning: list[int]  # NO_HOME: unlike all others

    def __len__(self) -> int:
        return len(self.at_s)


def drawn(size: Size, seed: int) -> Traffic:
    random = np.random.default_rng(seed)
    usual = random.poisson(size.per_s * size.seconds)
    first_s, last_s = size.burst_s
    more = random.poisson(size.burst * size.per_s * (last_s - first_s))
    at_s = np.concatenate([random.uniform(0, size.seconds, usual), random.uniform(first_s, last_s, more)])
    shares = np.cumsum(np.arange(1, size.tenants + 1) ** -1.05)
    tenant = np.concatenate([
        np.searchsorted(shares / shares[-1], random.random(usual)), random.integers(BURSTING.start, BURSTING.stop, more)
    ])  # fmt: skip
    order = np.argsort(at_s, kind="stable")
    count = usual + more
    priorities = random.choice([INTERACTIVE, USUAL, USUAL, USUAL, BATCH], size.tenants)
    priorities[list(BURSTING)] = USUAL
    begins = random.integers(0, size.beginnings, count) + size.beginnings * tenant
    begins[random.random(count) < 0.3] = NO_HOME
    return Traffic(
        at_s[order].tolist(),
        tenant[order].tolist(),
        priorities[tenant[order]].tolist(),
        _lengths(size.prompt_tokens, 8000, count, random),
        _lengths(size.output_tokens, 6000, count, random),
        begins[order].tolist(),
    )


def _lengths(mean: float, most: int, count: int, random: np.random.Generator) -> list[int]:
    """Draws lognormal lengths."""
    sigma = 1.0
    found: list[int] = (
        np.clip(random.lognormal(np.log(mean) - sigma**2 / 2, sigma, count), 1, most).astype(int).tolist()
    )
    return found
