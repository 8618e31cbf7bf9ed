"""Parses scraped metrics."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

OF_ALL = ("model", "queue")  # labels that every sample of a worker has


def scraped(page: str, without: tuple[str, ...] = OF_ALL) -> dict[str, float]:
    """Returns values by name, with the page's labels except for some."""
    found = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sample.labels.items() if name not in without)
            found[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
    return found


def names(page: str) -> set[str]:
    """Returns the names of all samples: what a query may ask for."""
    return {sample.name for family in text_string_to_metric_families(page) for sample in family.samples}
