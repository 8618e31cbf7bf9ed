"""Everything that dashboards and alerts query is exported. `test_prometheus.py` has Prometheus evaluate them."""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from docs.scripts.runbook_page import runbook_page
from penstock.protocol.redis.connection import RedisClient
from tests.support.observed import load, observed
from tests.support.packages import ROOT
from tests.support.promql import DASHBOARDS, RULES, alerts, expressions, labels, metrics, panels

OF_PROMETHEUS = {"up": {"job", "instance"}}
SCRAPED = {"job", "instance"}  # labels that Prometheus adds
RUNBOOK = (ROOT / "docs" / "runbook.md").read_text()
SERVED_RUNBOOK = ROOT / "deploy/prometheus/assets/runbook.html"


def test_there_are_some() -> None:
    assert len(DASHBOARDS) >= 3
    assert len(RULES) >= 1
    assert len(list(expressions())) > 80


def test_the_scenarios_that_alerts_are_tested_by_load_all_rules() -> None:
    scenarios = Path(__file__).with_name("alerts_test.yml")
    loaded = yaml.safe_load(scenarios.read_text())["rule_files"]
    assert sorted((scenarios.parent / path).resolve() for path in loaded) == sorted(RULES)


@pytest.mark.parametrize(
    ("expression", "names", "used"),
    [
        ("up == 0", {"up"}, set()),
        ('sum by (a, b) (rate(x_total{c=~"d,}", e!="f"}[5m])) > 0', {"x_total"}, {"a", "b", "c", "e"}),
        ("max(x) unless on (a) y{b!~'c'} or -z", {"x", "y", "z"}, {"a", "b"}),
        ("histogram_quantile(0.9, sum by (le) (rate(x_bucket[$__rate_interval]))) * 1e3", {"x_bucket"}, {"le"}),
    ],
)
def test_the_reader_of_expressions(expression: str, names: set[str], used: set[str]) -> None:
    assert (metrics(expression), labels(expression)) == (names, used)


async def test_all_that_is_asked_for_is_exported(redis_url: str, redis: RedisClient) -> None:
    exported = {name: set(found) for name, found in OF_PROMETHEUS.items()}
    async with observed(redis_url) as there:
        await load(there, redis)
        pages = await there.pages()
    for page in pages:
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                exported.setdefault(sample.name, set()).update(SCRAPED, sample.labels)
    missing = [(where, name) for where, text in expressions() for name in metrics(text) if name not in exported]
    assert missing == []
    for where, text in expressions():
        assert metrics(text), where
        known = set().union(*(exported[name] for name in metrics(text)))
        assert labels(text) <= known, where


async def test_all_that_is_exported_can_be_seen(redis_url: str, redis: RedisClient) -> None:
    """Dashboards show every metric, except those of no use to anybody who looks at one."""
    async with observed(redis_url) as there:
        await load(there, redis)
        families = [family for page in await there.pages() for family in text_string_to_metric_families(page)]
    shown = set().union(*(metrics(text) for _, text in expressions()))
    unseen = {family.name for family in families if not any(sample.name in shown for sample in family.samples)}
    assert unseen == UNSEEN


UNSEEN = {"process_virtual_memory_bytes"}  # reserved, and mostly never used: JAX asks for far more than it takes


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_dashboards_fit_any_grafana(path: Path) -> None:
    dashboard = json.loads(path.read_text())
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    assert "datasource" in variables
    used = set(re.findall(r"\$\{?(\w+)", path.read_text())) - {"__rate_interval", "__all"}
    assert used == variables
    everything = dashboard["panels"]
    assert len({panel["id"] for panel in everything}) == len(everything)
    assert Counter(panel["title"] for panel in everything).most_common(1)[0][1] == 1
    for panel in panels(path):
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert all(target["datasource"]["uid"] == "${datasource}" for target in panel["targets"])
        assert panel["targets"], panel["title"]
    for above, below in pairwise(everything):
        places = above["gridPos"], below["gridPos"]
        assert (places[0]["y"], places[0]["x"]) < (places[1]["y"], places[1]["x"])
        assert all(place["x"] + place["w"] <= 24 for place in places)


def test_uids_of_dashboards_are_their_own() -> None:
    uids = [json.loads(path.read_text())["uid"] for path in DASHBOARDS]
    assert len(set(uids)) == len(uids)


def test_each_alert_has_a_section_of_the_runbook_and_names_it() -> None:
    page = SERVED_RUNBOOK.read_text()
    assert page == runbook_page()
    sections = re.findall(r"^## (\w+)$", RUNBOOK, re.MULTILINE)
    names = [alert["alert"] for alert in alerts()]
    assert sections == names
    for alert in alerts():
        anchor = alert["alert"].lower()
        assert alert["annotations"]["runbook_url"] == f"{{{{ $externalURL }}}}/user/runbook.html#{anchor}"
        assert f'<h2 id="{anchor}">' in page
        assert alert["annotations"]["summary"].endswith((".", ")."))
        assert alert["labels"]["severity"] in ("warning", "critical")
    anchors = {f"#{name.lower()}" for name in sections}
    assert set(re.findall(r"\]\((#\w+)\)", RUNBOOK)) <= anchors
