from __future__ import annotations

import dataclasses
import os
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
import structlog

from docs.scripts.settings_page import page
from penstock.cli.shared.programs import GATEWAY, PROGRAMS, load_settings
from penstock.engine.config import EngineConfig
from penstock.engine.errors import CheckpointError, ConfigError
from penstock.engine.loading.naming.resolving import resolve
from penstock.gateway.settings import GatewaySettings
from penstock.local.engine_options import engine_config
from penstock.protocol.redis.address import parse_url
from penstock.serving.setting_fields import group_of
from penstock.tools.bench.errors import ImpossibleLoad
from penstock.tools.bench.presets import preset_root
from penstock.tools.plan.models import planned_model
from penstock.worker.config import WorkerConfig
from penstock.worker.settings import Settings
from penstock.worker.settings_loading import SettingsError, load
from tests.support.packages import ROOT

NOT_OF_A_CONFIG = {"otel", "redis_url", "model", "log_level", "log_format"}  # read by the commands themselves


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name == "REDIS_URL" or name.startswith("PENSTOCK_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def write_toml(text: str, name: str = "penstock.toml") -> Path:
    path = Path(name)
    path.write_text(text)
    return path


def test_flags_go_before_environment_before_file_before_default(monkeypatch: pytest.MonkeyPatch) -> None:
    write_toml('queue = "file"\nmax_num_seqs = 3\nflush_interval_ms = 5\n')
    monkeypatch.setenv("PENSTOCK_QUEUE", "environment")
    monkeypatch.setenv("PENSTOCK_MAX_NUM_SEQS", "4")
    settings: Any = load_settings({"queue": "flag"})
    assert (settings.queue, settings.max_num_seqs, settings.flush_interval_ms) == ("flag", 4, 5)
    assert settings.max_batch_tokens == 512


def test_the_file_is_the_named_one_else_that_of_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    write_toml('queue = "here"')
    variable = write_toml('queue = "variable"', "variable.toml")
    named = write_toml('queue = "named"', "named.toml")
    assert load_settings({}).queue == "here"
    monkeypatch.setenv("PENSTOCK_CONFIG", str(variable))
    assert load_settings({}).queue == "variable"
    assert load_settings({}, named).queue == "named"


def test_redis_url_falls_back_to_the_common_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://common:1")
    assert load_settings({}).redis_url == "redis://common:1"
    write_toml('redis_url = "redis://file:2"')
    assert load_settings({}).redis_url == "redis://file:2"


@pytest.mark.parametrize(
    "url",
    ["redis://h", "rediss://u:p@h:1/2", "unix:///run/r.sock", "redis+cluster://a:1,b:2", "redis+sentinel://s:1/main"],
)
def test_urls_of_every_deployment_are_taken(url: str) -> None:
    assert parse_url(load_settings({"redis_url": url}).redis_url)


@pytest.mark.parametrize("name", ["PENSTOCK_MAX_NUM_SEQ", "penstock_max_num_seq"])
def test_unknown_variable_is_named_with_the_nearest(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "3")
    with pytest.raises(SettingsError, match=f"variable {name}; did you mean PENSTOCK_MAX_NUM_SEQS"):
        load_settings({})


def test_unknown_key_is_named_with_file_and_nearest() -> None:
    write_toml("flush_interval = 3")
    with pytest.raises(SettingsError, match=r"'flush_interval' in penstock.toml; did you mean flush_interval_ms"):
        load_settings({})


def test_a_gateway_has_a_table_and_variables_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    write_toml('queue = "q"\n[gateway]\nport = 1\nhost = "::1"\nqueues = "a, b,"\n')
    monkeypatch.setenv("PENSTOCK_GATEWAY_PORT", "2")
    settings = load(GATEWAY, PROGRAMS, {"workers": "3"})
    assert (settings.port, settings.host, settings.queues, settings.workers) == (2, "::1", ("a", "b"), 3)
    assert load_settings({}).queue == "q"


@pytest.mark.parametrize("written", ['"small, org/model"', '["small", "org/model"]'])
def test_a_list_is_written_as_one_or_with_commas(written: str) -> None:
    write_toml(f"served_model_name = {written}")
    assert load_settings({}).worker_config().served_model_name == ("small", "org/model")
    assert load_settings({"served_model_name": "a"}).worker_config().served_model_name == ("a",)
    with pytest.raises(SettingsError, match=r"--served-model-name: must be .*, not 'a b'"):
        load_settings({"served_model_name": "a b"})


def test_a_gateway_shares_some_of_a_worker_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://common:1")
    write_toml('redis_url = "redis://file:2"\nlog_level = "error"\nmax_body_bytes = 5\n')
    settings = load(GATEWAY, PROGRAMS, {})
    assert (settings.redis_url, settings.log_level, settings.max_body_bytes) == ("redis://file:2", "error", 4 << 20)
    monkeypatch.setenv("PENSTOCK_REDIS_URL", "redis://worker:3")
    assert load(GATEWAY, PROGRAMS, {}).redis_url == "redis://worker:3"
    monkeypatch.setenv("PENSTOCK_GATEWAY_REDIS_URL", "redis://gateway:4")
    assert load(GATEWAY, PROGRAMS, {}).redis_url == "redis://gateway:4"
    assert load_settings({}).redis_url == "redis://worker:3"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[gateway]\nprot = 1", r"'prot' in \[gateway\] of penstock.toml; did you mean port"),
        ("gateway = 1", r"gateway in penstock.toml is not a table: write \[gateway\]"),
        ("[gateway]\nport = 99999", r"port in \[gateway\] of penstock.toml: .*, not '99999'"),
        ('[gateway]\ntls_key = "k"', "TLS needs tls_key and tls_certificate: tls_certificate is not set"),
        ('[gateway]\nqueues = "a b"', "not 'a b'"),
        ('[gateway]\nhost = ""', r"host in \[gateway\] of penstock.toml: an address is needed"),
    ],
)
def test_a_wrong_setting_of_a_gateway_is_named(text: str, message: str) -> None:
    write_toml(text)
    with pytest.raises(SettingsError, match=message):
        load(GATEWAY, PROGRAMS, {})


def test_every_setting_of_a_gateway_says_what_it_is() -> None:
    fields = GatewaySettings.model_fields
    assert [name for name, field in fields.items() if not (field.description and group_of(field))] == []
    assert load(GATEWAY, PROGRAMS, {}) == GatewaySettings()


def test_a_table_is_an_unknown_key() -> None:
    write_toml("[engine]\nmax_num_seqs = 3")
    with pytest.raises(SettingsError, match=r"'engine' in penstock\.toml"):
        load_settings({})


@pytest.mark.parametrize(("text", "message"), [(None, "missing.toml cannot be read"), ("a = [", "is not TOML")])
def test_a_file_that_cannot_be_read(text: str | None, message: str) -> None:
    path = Path("missing.toml") if text is None else write_toml(text)
    with pytest.raises(SettingsError, match=message):
        load_settings({}, path)


def test_a_bad_value_names_where_it_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    write_toml('block_ms = "soon"')
    monkeypatch.setenv("PENSTOCK_MAX_NUM_SEQS", "many")
    with pytest.raises(SettingsError) as caught:
        load_settings({"log_level": "loud"})
    for part in ("--log-level", "'loud'", "PENSTOCK_MAX_NUM_SEQS", "'many'", "block_ms in penstock.toml", "'soon'"):
        assert part in str(caught.value)


def test_a_bad_url_is_not_shown_with_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", "http://user:hunter2@host")
    with pytest.raises(SettingsError, match=r"^REDIS_URL: .*'http'") as caught:
        load_settings({})
    assert "hunter2" not in str(caught.value)
    assert "hunter2" not in repr(load_settings({"redis_url": "redis://user:hunter2@host"}))


def test_empty_variables_are_not_set_and_none_is_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_QUEUE", "")
    monkeypatch.setenv("PENSTOCK_HEALTH_PORT", "none")
    monkeypatch.setenv("PENSTOCK_KV_CACHE_BYTES", "512MiB")
    settings: Any = load_settings({"compile_cache_dir": "none"})
    assert (settings.queue, settings.health_port, settings.compile_cache_dir) == ("default", None, None)
    assert settings.kv_cache_bytes == 512 << 20


def test_every_setting_reaches_a_config_and_every_config_field_is_a_setting() -> None:
    of_configs = {field.name for config in (WorkerConfig, EngineConfig) for field in fields(config)}
    assert of_configs == set(Settings.model_fields) - NOT_OF_A_CONFIG


@pytest.mark.parametrize("config", [WorkerConfig, EngineConfig])
def test_defaults_are_those_of_the_configs(config: Any) -> None:
    left = {"name", "compile_cache_dir"}  # made up at start; kept on disk only for a service
    expected = {field.name: field.default for field in fields(config) if field.name not in left}
    assert MISSING not in expected.values()
    assert {name: getattr(load_settings({}), name) for name in expected} == expected


def test_settings_become_configs(tmp_path: Path) -> None:
    settings = load_settings({"name": "w1", "queue": "q", "page_size": "32", "compile_cache_dir": str(tmp_path)})
    worker, engine = settings.worker_config(), settings.engine_config()
    assert (worker.name, worker.queue) == ("w1", "q")
    assert (engine.page_size, engine.compile_cache_dir) == (32, tmp_path)


def test_the_cache_is_in_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert load_settings({}).engine_config().compile_cache_dir == Path("/home/someone/.cache/penstock/compile")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert load_settings({}).engine_config().compile_cache_dir == Path("/cache/penstock/compile")


def test_the_page_of_settings_is_current() -> None:
    written = ROOT / "docs" / "configuration.md"
    assert written.read_text() == page(), "run `make docs`"


def test_what_goes_into_commands_is_of_plain_types() -> None:
    config = load_settings({"max_body_bytes": "2KiB"}).worker_config()
    assert (config.max_body_bytes, type(config.max_body_bytes)) == (2048, int)
    fields = {field.name for field in dataclasses.fields(config)} - {"served_model_name"}  # only the card has it
    kinds = {type(getattr(config, name)) for name in fields}
    assert kinds <= {int, float, str, bool, type(None)}


def test_without_a_home_folder_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", nowhere)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    with structlog.testing.capture_logs() as logged:
        assert load_settings({}).engine_config().compile_cache_dir is None
    assert [line["event"] for line in logged] == ["compilations_not_kept"]
    assert engine_config({}).compile_cache_dir is None
    for find in (resolve, planned_model):
        with pytest.raises((CheckpointError, ConfigError), match=r"no directory|not a preset"):
            find("~/model")
    with pytest.raises(ImpossibleLoad, match="Set XDG_CACHE_HOME"):
        preset_root()
