from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

import pytest

from penstock.engine.setting import Setting, declared
from penstock.protocol import keys
from penstock.protocol.wire import ID_PATTERN
from penstock.worker.config import MAX_DEAD_TTL_S, WorkerConfig, default_name
from penstock.worker.errors import BadWorkerConfig


def test_a_worker_is_called_like_nobody_else() -> None:
    first, second = default_name(), default_name()
    assert first != second
    assert ID_PATTERN.fullmatch(first)
    assert WorkerConfig().name != WorkerConfig().name


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"queue": "a b"}, "queue must be"),
        ({"queue": ""}, "queue must be"),
        ({"queue": "gateway"}, "queue must be another one"),
        ({"name": "{x}"}, "name must be"),
        ({"name": "w/starting"}, "name must be"),  # what a process that loads is called in Redis
        ({"name": keys.UNOWNED}, "name must be another one"),
        ({"heartbeat_ttl_s": 0}, "heartbeat_ttl_s must be above 0, not 0"),
        ({"max_n": -1}, "max_n must be above 0, not -1"),
        ({"flush_interval_ms": -1}, "flush_interval_ms must be 0 or more, not -1"),
        ({"max_prompt_tokens": 0}, "max_prompt_tokens must be above 0, not 0"),
        ({"health_host": ""}, "health_host must be an address, not ''"),
        ({"health_port": 65_536}, "health_port must be 0 to 65535, not 65536"),
        ({"block_ms": 10_001}, "block_ms must be at most 10000, not 10001"),
        ({"dead_ttl_s": MAX_DEAD_TTL_S + 1}, "dead_ttl_s must be at most"),
    ],
)
def test_a_value_out_of_range_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(BadWorkerConfig, match=re.escape(message)):
        WorkerConfig(**values)


def test_every_field_declares_what_it_means() -> None:
    assert list(declared(WorkerConfig)) == [field.name for field in fields(WorkerConfig)]
    assert [name for name, field in declared(WorkerConfig).items() if not field.setting.text.endswith(".")] == []


@pytest.mark.parametrize(("name", "setting"), [(name, field.setting) for name, field in declared(WorkerConfig).items()])
def test_a_setting_is_refused_by_name_outside_its_declared_range(name: str, setting: Setting) -> None:
    wrong = [float("nan")] if (setting.least, setting.above) != (None, None) else []
    wrong += [setting.above] if setting.above is not None else []
    wrong += [setting.least - 1] if setting.least is not None else []
    wrong += [setting.most + 1] if setting.most is not None else []
    for value in wrong:
        values: dict[str, Any] = {name: value}
        with pytest.raises(BadWorkerConfig, match=rf"^{name} must be .*, not {value!r}$") as caught:
            WorkerConfig(**values)
        assert caught.value.settings == (name,)


@pytest.mark.parametrize(
    "values", [{"health_port": None}, {"health_port": 0}, {"max_prompt_tokens": None}, {"drain_timeout_s": 0}]
)
def test_what_stands_for_none_is_fine(values: dict[str, Any]) -> None:
    config = WorkerConfig(**values)
    assert {name: getattr(config, name) for name in values} == values
