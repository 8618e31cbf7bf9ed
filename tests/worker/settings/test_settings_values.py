"""Any value of a setting is taken, or refused at once with its name, its value and its place."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.cli.shared.programs import GATEWAY, PROGRAMS, load_settings
from penstock.gateway.settings import GatewaySettings
from penstock.worker.settings import WORKER, Settings
from penstock.worker.settings_loading import (
    CONFIG_VARIABLE,
    LONGEST_S,
    MAX_FILE_BYTES,
    SHORTEST_S,
    Program,
    SettingsError,
    flag,
    load,
)
from tests.support.programs.gateway_harness import Certificate

JUNK = (
    "1e400", "-1e400", "nan", "inf", "1e-9", "-1e-9", "1e300", "1Gi", "1 gi", "-1", "0", "9" * 30, "9" * 5000, "x\ny",
    "\x1b[0m", "x\r\n", " 1 ", "\ufeff1", "[]", "{}", "none", "on", "/no/such/file", "é" * 200, "a..b", "65535",
    "\udc80", "gateway", "unowned", "redis://h%0a", "redis://h?ssl_ca_certs=%00", f"redis://{'h' * 70}", "1" + "0" * 15,
)  # fmt: skip
FIELDS = [(WORKER, name) for name in Settings.model_fields] + [(GATEWAY, name) for name in GatewaySettings.model_fields]
Place = Callable[[Program[Any], str, str], Any]


@contextmanager
def at_the_flag(program: Program[Any], name: str, value: str) -> Iterator[tuple[dict[str, str], str]]:
    yield {name: value}, f"{flag(name)}"


@contextmanager
def in_the_environment(program: Program[Any], name: str, value: str) -> Iterator[tuple[dict[str, str], str]]:
    variable = program.variable(name)
    with mock.patch.dict(os.environ, {variable: value.replace("\0", "\n")}):
        yield {}, variable


@pytest.fixture
def in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    file = tmp_path / "some.toml"
    file.write_text("")
    monkeypatch.setenv(CONFIG_VARIABLE, str(file))

    @contextmanager
    def write(program: Program[Any], name: str, value: str) -> Iterator[tuple[dict[str, str], str]]:
        table, head = ("", "") if program.table is None else (f"[{program.table}] of ", f"[{program.table}]\n")
        text = json.dumps(value.encode(errors="replace").decode(), ensure_ascii=False).replace("\x7f", "\\u007f")
        file.write_text(f"{head}{name} = {text}\n")
        yield {}, f"{name} in {table}{file}"
        file.write_text("")

    return write


def check(program: Program[Any], name: str, value: str, place: Place) -> None:
    with place(program, name, value) as (flags, where):
        try:
            found = load(program, PROGRAMS, flags)
        except SettingsError as error:
            message = str(error)
            assert message.startswith(f"{where}: "), message
            assert message.isprintable()
            assert len(message) < 2000
            return
    if isinstance(found, Settings):  # what is made of it later
        found.worker_config()
        found.engine_config()
    check_bounds(name, getattr(found, name))


def check_bounds(name: str, found: Any) -> None:
    if isinstance(found, float):
        assert math.isfinite(found)
    if isinstance(found, int | float) and not isinstance(found, bool):
        assert abs(found) < 2**63
    if isinstance(found, int | float) and name.endswith("_s") and found:
        assert SHORTEST_S <= abs(found) <= LONGEST_S
    if isinstance(found, str):
        assert found == found.strip()
        assert found.isprintable()


@pytest.mark.parametrize(("program", "name"), FIELDS, ids=lambda value: value if isinstance(value, str) else "")
def test_junk_is_taken_within_bounds_or_refused_by_name_and_place(
    program: Program[Any], name: str, in_the_file: Place
) -> None:
    for at, value in enumerate(JUNK):
        check(program, name, value, (at_the_flag, in_the_environment, in_the_file)[at % 3])


words = st.text(min_size=1, max_size=20)
SCHEMES = ["redis", "rediss", "unix", "redis+sentinel", "redis+cluster"]
PARTS = (
    ["", "u:p@", ":@", "%00:%ff@"],
    ["", "h", "h:1,i:2", "[::1]:70000", "h%0a", "h:0", "..", "%", "[:"],
    ["", "/", "/0", "/x/1", "/99999999999", "/%0a"],
    ["", "?", "?db=1", "?db=-1", "?ssl=True", "?protocol=4", "?ssl_cert_reqs=CERT_NONE", "?x", "?@"],
)
urls = st.builds("{}://{}{}{}{}".format, st.sampled_from(SCHEMES), *map(st.sampled_from, PARTS))
values = words | urls | st.floats().map(str) | st.integers().map(str) | st.integers(-2, 2**17).map(str)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(field=st.sampled_from(FIELDS), value=values, place=st.integers(0, 2))
def test_so_is_anything_else(field: tuple[Program[Any], str], value: str, place: int, in_the_file: Place) -> None:
    value = value.strip() or "x"  # an empty value is not set
    check(*field, value, (at_the_flag, in_the_environment, in_the_file)[place])


@pytest.mark.parametrize(
    ("flags", "variables", "message"),
    [
        ({"max_num_seqs": "0"}, {}, "--max-num-seqs: must be 1 or more, not 0"),
        ({}, {"PENSTOCK_MAX_ATTEMPTS": "0"}, "PENSTOCK_MAX_ATTEMPTS: must be above 0, not 0"),
        ({"max_num_seqs": "64"}, {"PENSTOCK_MAX_BATCH_TOKENS": "32"},
         "--max-num-seqs, PENSTOCK_MAX_BATCH_TOKENS: max_num_seqs 64 is above max_batch_tokens 32: "),
        ({"max_batch_tokens": "16"}, {}, "--max-batch-tokens: max_num_seqs 64 is above max_batch_tokens 16: "),
        ({}, {"PENSTOCK_ATTENTION": "flash"}, "PENSTOCK_ATTENTION: must be one of auto, native, xla, "),
        ({"dtype": "int9"}, {}, "--dtype: must be one of auto, float32, bfloat16, float16, not 'int9'"),
        ({"chat_format": "x"}, {}, "--chat-format: must be auto, none or one of "),
        ({"block_ms": "10001"}, {}, "--block-ms: must be at most 10000, not 10001"),
    ],
)  # fmt: skip
def test_what_is_out_of_range_is_named_with_its_place(
    flags: dict[str, str], variables: dict[str, str], message: str
) -> None:
    with mock.patch.dict(os.environ, variables), pytest.raises(SettingsError) as caught:
        load_settings(flags)
    assert str(caught.value).startswith(message)
    assert str(caught.value).count(", not ") <= 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"tls_key": "k"}, "--tls-key: TLS needs tls_key and tls_certificate: tls_certificate is not set"),
        ({"metrics_port": "65535", "workers": "2"}, "--metrics-port, --workers: metrics_port 65535 and the next "),
        ({"max_connections": str(2**21)}, "--max-connections: "),
        ({"queues": "a,gateway"}, "--queues: no queue is called 'gateway'"),
        ({"max_header_bytes": "10"}, "--max-header-bytes: "),
    ],
)
def test_so_is_what_a_gateway_could_not_use(flags: dict[str, str], message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load(GATEWAY, PROGRAMS, flags)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("value", "name"), [("true", "max_num_seqs"), ("3", "queue"), ("[1]", "queue"), ("{a = 1}", "block_ms"),
                        ("1979-05-27", "name"), ("inf", "block_ms"), ("nan", "prefill_share"), ('["x"]', "model")],
)  # fmt: skip
def test_other_types_of_toml_are_refused(value: str, name: str, tmp_path: Path) -> None:
    file = tmp_path / "some.toml"
    file.write_text(f"{name} = {value}\n")
    with pytest.raises(SettingsError) as caught:
        load_settings({}, file)
    assert str(caught.value).startswith(f"{name} in {file}: ")
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("queue = 'q'".encode("utf-16"), "is not TOML, which is UTF-8"),
        (b"queue = '\xff'", "is not TOML, which is UTF-8"),
        ("queue = 'q'".encode("utf-16-le"), "is not TOML"),
        (b"block_ms = " + b"9" * 5000, "is not TOML: Exceeds the limit"),
        (b"queue = " + b"[" * 100_000, "is not TOML: "),
        (b"queue = 'a'\nqueue = 'b'", "Cannot overwrite a value"),
        (b"#" * (MAX_FILE_BYTES + 1), "it is not a settings file"),
        (b"\0" * 10, "is not TOML"),
        (None, "Is a directory"),
        (b"", None),
        (b"\xef\xbb\xbfqueue = 'q'\r\n# c\r\n", None),
    ],
)
def test_a_file_that_is_none_is_named(
    content: bytes | None, message: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = Path("penstock.toml")
    if content is None:
        file.mkdir()  # as container engines do where the one that is to be mounted is missing
    else:
        file.write_bytes(content)
    if message is None:
        assert load_settings({})
        return
    with pytest.raises(SettingsError) as caught:
        load_settings({})
    assert str(caught.value).startswith("configuration file penstock.toml ")
    assert message in str(caught.value)


def test_bytes_as_kubernetes_writes_them() -> None:
    for text, size in (("1Gi", 2**30), ("1.5 Mi", 3 * 2**19)):
        settings: Any = load_settings({"kv_cache_bytes": text})
        assert settings.kv_cache_bytes == size


def test_what_surrounds_a_value_in_a_file_is_no_part_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "penstock.toml"
    file.write_bytes('\ufeffqueue = "q\\n"\nmax_num_seqs = 3\n'.encode())
    monkeypatch.setenv("PENSTOCK_REDIS_URL", "redis://a:1/2\r\n")
    settings: Any = load_settings({}, file)
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
