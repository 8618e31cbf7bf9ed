"""Sizes an engine's KV cache and state slots, from the settings or from the memory that is free."""

from __future__ import annotations

from penstock.engine.attention import CacheSpec
from penstock.engine.deployment.deployment import Deployment, usable
from penstock.engine.errors import ConfigError
from penstock.engine.scheduling.memory.amounts import Amount


def sized(deployment: Deployment) -> CacheSpec:
    """Returns the pages and state slots of an engine whose weights are loaded.

    Raises:
        ConfigError: there is not even one page for each group of layers besides page 0, or the settings ask for more
            than a device has left, if its runtime counts its memory.
    """
    spec = with_pages(deployment, deployment.free_bytes())
    for memory in deployment.device_memory()[:1]:
        free = memory.limit_bytes - memory.used_bytes
        check_pages(deployment, spec, free, memory.limit_bytes, deployment.devices[0].device_kind)
    return spec


def with_pages(deployment: Deployment, free_bytes: int) -> CacheSpec:
    """Returns the pages and state slots that the settings ask for or memory holds, up to what all sequences could fill.

    Raises:
        ConfigError: there is not even one page for each group of layers besides page 0.
    """
    config, needs = deployment.config, deployment.needs
    fewest = needs.by_kind([1] * needs.num_groups)
    spec = fitting(deployment, config.kv_cache_bytes or free_bytes)
    if fewest.fits(usable(spec)):
        return spec
    if config.num_pages is not None:
        raise ConfigError(
            f"num_pages must be {1 + max(fewest.counts)} or more, not {config.num_pages}: the model has "
            f"{needs.num_groups} groups of layers with pages of their own, and page 0 only takes padding"
        )
    states = f"; {spec.num_states} states have {spec.num_states * deployment.state_bytes}" if spec.num_states else ""
    held = f"; logits of max_num_seqs {config.max_num_seqs} keep {deployment.logits_bytes} bytes for themselves"
    raise ConfigError(
        " and ".join(
            f"the KV cache holds {count} pages of {num_bytes} bytes, and needs {1 + least} at least"
            for count, num_bytes, least in zip(spec.counts, deployment.kind_bytes, fewest.counts, strict=True)
        )
        + states
        + ("" if config.kv_cache_bytes else held)
    )


def check_pages(deployment: Deployment, spec: CacheSpec, free_bytes: int, of_bytes: int, device: str) -> None:
    """Checks that the pages fit into `free_bytes`, which is what the weights leave of each device's `of_bytes`.

    Raises:
        ConfigError: they do not fit. The message says how much would.
    """
    num_bytes = deployment.pages_bytes(Amount(spec.counts))
    if num_bytes > free_bytes:
        is_counted = deployment.config.num_pages is not None
        most = f"num_pages {free_bytes // deployment.page_bytes}" if is_counted else f"kv_cache_bytes {free_bytes}"
        raise ConfigError(
            f"{sum(spec.counts)} pages take {num_bytes} bytes, and the weights leave {free_bytes} of the {of_bytes} "
            f"that a {device} device has: set {most} or less"
        )


def fitting(deployment: Deployment, num_bytes: int) -> CacheSpec:
    """Returns the cache that fits into `num_bytes`, unless the settings give the numbers.

    State slots for running sequences take up to half of the memory. Pages, and states for the prefixes they may hold,
    share the rest.

    Raises:
        ConfigError: the settings ask for state slots, and the model keeps no states.
    """
    config, asked = deployment.config, _asked_states(deployment)
    running = _running_states(deployment, num_bytes) if asked is None else asked
    if config.num_pages is None:
        free = num_bytes - running * deployment.state_bytes
        num_pages = _affordable(deployment, free, keeps_states=asked is None)
    else:
        num_pages = Amount((config.num_pages,) * len(deployment.kind_bytes))
    return deployment.cache_spec(num_pages, running + (deployment.kept_states(num_pages) if asked is None else 0))


def _affordable(deployment: Deployment, num_bytes: int, *, keeps_states: bool) -> Amount:
    """Returns the pages of each kind that fit into `num_bytes`, up to what all sequences together could fill.

    Kinds bounded by a sliding window are allocated like states: each running sequence first gets what its windows span,
    out of at most half of the memory. The other kinds, and the states of prefixes, share the rest so that they cover
    the same number of tokens. What is left then goes to prefixes behind windows.
    """
    needs, useful, sizes = deployment.needs, useful_pages(deployment), deployment.kind_bytes
    bounded = sorted(needs.bounded_kinds) if len(needs.bounded_kinds) < needs.num_kinds else []
    counts = [0] * needs.num_kinds
    for kind in bounded:
        wanted = _running_pages(deployment).counts
        of_all = sum(wanted[other] * sizes[other] for other in bounded)
        counts[kind] = int(wanted[kind] * min(1.0, num_bytes / 2 / of_all))
    left = num_bytes - deployment.pages_bytes(Amount(tuple(counts)))
    groups = needs.by_kind([1] * needs.num_groups).counts
    others = [kind for kind in range(needs.num_kinds) if kind not in bounded]
    keeps_states = keeps_states and deployment.config.prefix_caching
    kept = deployment.state_bytes / deployment.state_interval if keeps_states else 0.0
    span = sum(groups[kind] * sizes[kind] for kind in others) + kept
    for kind in others:
        counts[kind] = max(0, min(int(left * groups[kind] / span), useful.counts[kind]))
    left -= sum(counts[kind] * sizes[kind] for kind in others)
    left -= deployment.state_bytes * deployment.kept_states(Amount(tuple(counts))) if keeps_states else 0
    for kind in bounded:
        more = max(0, left) // sum(sizes[other] for other in bounded)
        counts[kind] = min(useful.counts[kind], counts[kind] + more)
    return Amount(tuple(counts))


def _running_pages(deployment: Deployment) -> Amount:
    """Returns the pages that `max_num_seqs` sequences hold while all but one decode, plus page 0 of each kind."""
    config, needs = deployment.config, deployment.needs
    decoding = needs.held(deployment.max_model_len, 1).counts
    starting = needs.held(deployment.max_model_len, config.max_batch_tokens).counts
    return Amount(
        tuple(1 + one + (config.max_num_seqs - 1) * each for one, each in zip(starting, decoding, strict=True))
    )


def _asked_states(deployment: Deployment) -> int | None:
    """Returns the configured number of slots plus slot 0, or None if it is not set.

    Raises:
        ConfigError: it is set, and the model keeps no states.
    """
    asked = deployment.config.state_slots
    if not deployment.model.has_states:
        if asked is not None:
            raise ConfigError(f"state_slots = {asked}, and no layer of the model keeps a state")
        return 0
    return None if asked is None else 1 + asked


def _running_states(deployment: Deployment, num_bytes: int) -> int:
    """Returns the number of slots for running sequences, plus slot 0."""
    most = 1 + deployment.config.max_num_seqs
    if deployment.config.num_pages is not None:  # then the settings decide how much memory is used
        return most
    return max(2, min(most, num_bytes // 2 // deployment.state_bytes))


def useful_pages(deployment: Deployment) -> Amount:
    """Returns the pages that all sequences together could fill, plus page 0 of each kind."""
    config = deployment.config
    most = deployment.needs.held(deployment.max_model_len, config.max_batch_tokens)
    return Amount(tuple(config.max_num_seqs * count + 1 for count in most.counts))
