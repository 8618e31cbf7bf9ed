"""Whatever stands in a setting: it is taken, or refused at once with its name and place."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gateway_harness import Certificate
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.settings import GatewaySettings
from penstock.worker.errors import BadWorkerConfig
from penstock.worker.settings import GATEWAY, PROGRAMS, WORKER, Settings, load_settings
from penstock.worker.settings_loading import LONGEST_S, SHORTEST_S, Program, SettingsError, flag, load

JUNK = (
    "1e400", "-1e400", "nan", "inf", "1e-9", "-1e-9", "1e300", "1Gi", "1 gi", "-1", "0", "9" * 30, "x\ny", "\x1b[0m",
    "\0", "x\r\n", " 1 ", "\ufeff1", "[]", "{}", "none", "on", "/no/such/file", "é" * 200,
)  # fmt: skip
FIELDS = [(WORKER, name) for name in Settings.model_fields] + [(GATEWAY, name) for name in GatewaySettings.model_fields]


def loaded(program: Program[Any], name: str, value: str) -> Any:
    """The value as it was read; None if it was refused, which has to name where it stood."""
    try:
        settings = load(program, PROGRAMS, {name: value})
    except SettingsError as error:
        message = str(error)
        assert flag(name) in message or name in message
        assert message.isprintable()
        return None
    if program is WORKER:
        refused = [message for part in (settings.worker_config, settings.engine_config) for message in refusal(part)]
        assert all(name in message or flag(name) in message for message in refused)
    return getattr(settings, name)


def refusal(part: Callable[[], object]) -> list[str]:
    try:
        part()
    except (SettingsError, BadWorkerConfig) as error:
        return [str(error)]
    return []


@pytest.mark.parametrize(("program", "name"), FIELDS, ids=lambda value: value if isinstance(value, str) else "")
def test_junk_is_taken_within_bounds_or_refused_by_name(program: Program[Any], name: str) -> None:
    for value in JUNK:
        check(name, loaded(program, name, value))


@given(field=st.sampled_from(FIELDS), value=st.text(min_size=1) | st.floats().map(str) | st.integers().map(str))
def test_so_is_anything_else(field: tuple[Program[Any], str], value: str) -> None:
    program, name = field
    check(name, loaded(program, name, value))


def check(name: str, found: Any) -> None:
    if isinstance(found, float):
        assert math.isfinite(found)
    if isinstance(found, int | float) and name.endswith("_s") and found:
        assert SHORTEST_S <= abs(found) <= LONGEST_S
    if isinstance(found, str):
        assert found == found.strip()
        assert found.isprintable()


def test_bytes_as_kubernetes_writes_them() -> None:
    assert load_settings({"kv_cache_bytes": "1Gi"}).kv_cache_bytes == 2**30
    assert load_settings({"kv_cache_bytes": "1.5 Mi"}).kv_cache_bytes == 3 * 2**19


def test_what_surrounds_a_value_in_a_file_is_no_part_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "penstock.toml"
    file.write_bytes('\ufeffqueue = "q\\n"\nmax_num_seqs = 3\n'.encode())
    monkeypatch.setenv("PENSTOCK_REDIS_URL", "redis://a:1/2\r\n")
    settings = load_settings({}, file)
    assert (settings.queue, settings.max_num_seqs, settings.redis_url) == ("q", 3, "redis://a:1/2")


@pytest.mark.parametrize("program", [WORKER, GATEWAY], ids=["worker", "gateway"])
@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("ssl_ca_certs={there}.gone", "ssl_ca_certs {there}.gone"),
        ("ssl_ca_certs={junk}", "ssl_ca_certs {junk}"),
        ("ssl_certfile={there}.gone&ssl_keyfile={key}", "ssl_certfile {there}.gone and ssl_keyfile {key}"),
        ("ssl_certfile={there}&ssl_keyfile={other}", "ssl_certfile {there} and ssl_keyfile {other}"),
        ("ssl_keyfile={key}", "ssl_keyfile of the Redis URL needs ssl_certfile"),
        ("ssl_ca_certs={there}&ssl_certfile={there}&ssl_keyfile={key}", None),
    ],
)
def test_certificates_of_redis_are_looked_at_before_they_are_needed(
    program: Program[Any], option: str, words: str | None, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    made, other = Certificate.made_in(tmp_path), Certificate.made_in(tmp_path / "other")
    (tmp_path / "junk").write_text("no certificate")
    names = {"there": made.file, "key": made.key, "other": other.key, "junk": tmp_path / "junk"}
    url = f"rediss://user:secret@a:1/0?{option.format(**names)}"
    if words is None:
        load(program, PROGRAMS, {"redis_url": url})
        return
    with pytest.raises(SettingsError) as caught:
        load(program, PROGRAMS, {"redis_url": url})
    assert str(caught.value).startswith("--redis-url: ")
    assert words.format(**names) in str(caught.value)
    assert "secret" not in str(caught.value)
