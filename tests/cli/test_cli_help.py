from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from penstock.cli import app
from penstock.gateway.settings import GatewaySettings
from penstock.worker.settings import Settings
from penstock.worker.settings_loading import flag
from tests.cli.cli_process import command, penstock

HEAVY = ("jax", "flax", "numpy", "transformers", "penstock.engine.engine", "uvicorn", "prometheus_client", "starlette")
COMMANDS = tuple(typer.main.get_command(app).commands)  # type: ignore[attr-defined]  # of a click that is typer's own

RUN_AND_LIST_MODULES = f"""
import sys
from penstock.cli import main
try:
    main()
finally:
    print("loaded:", *(name for name in {HEAVY} if name in sys.modules))
"""
WITHOUT = "import sys; sys.modules['{}'] = None\nfrom penstock.cli import main\nmain()"


async def test_help_lists_every_command() -> None:
    outcome = await penstock("--help")
    assert outcome.status == 0
    for name in COMMANDS:
        assert f"│ {name} " in outcome.out


def test_no_arguments_show_the_help_as_a_usage_error() -> None:
    outcome = command()
    assert outcome.status == 2
    assert "Usage: penstock [OPTIONS] COMMAND" in outcome.out + outcome.err


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command(name: str) -> None:
    outcome = command(name, "--help")
    assert outcome.status == 0
    assert f"Usage: penstock {name} [OPTIONS]" in outcome.out
    assert outcome.err == ""


def test_types_of_values_have_one_spelling() -> None:
    for name in COMMANDS:
        group = getattr(typer.main.get_command(app).commands[name], "commands", {})  # type: ignore[attr-defined]  # as above
        for words in [[name, each] for each in group] or [[name]]:
            assert re.findall(r"INTEGER|FLOAT", command(*words, "--help").out) == [], words


def test_a_shell_completes_commands() -> None:
    outcome = command(_PENSTOCK_COMPLETE="complete_bash", COMP_WORDS="penstock wor", COMP_CWORD="1")
    assert outcome.out.split() == ["worker", "workers"]


def test_worker_has_an_option_for_every_setting() -> None:
    out = command("worker", "--help", COLUMNS="200").out
    assert [name for name in Settings.model_fields if f"{flag(name)} " not in out] == []


def test_gateway_has_an_option_for_every_setting() -> None:
    out = command("gateway", "--help", COLUMNS="200").out
    assert [name for name in GatewaySettings.model_fields if f"{flag(name)} " not in out] == []


@pytest.mark.parametrize(
    "arguments", [["--help"], ["send", "--help"], ["dead", "replay", "--help"], ["drain", "--help"], ["--version"]]
)
async def test_light_commands_load_nothing_heavy(arguments: list[str]) -> None:
    outcome = await penstock(*arguments, code=RUN_AND_LIST_MODULES)
    assert outcome.out.splitlines()[-1].strip() == "loaded:", outcome
    assert "Traceback" not in outcome.err


@pytest.mark.parametrize(
    ("name", "extra", "module"),
    [("worker", "worker", "jax"), ("demo", "worker", "jax"), ("gateway", "gateway", "starlette")],
)
async def test_a_missing_extra_is_one_line_that_says_what_to_install(name: str, extra: str, module: str) -> None:
    outcome = await penstock(name, code=WITHOUT.format(module))
    assert outcome.status == 1
    assert outcome.err == f"penstock: {module} is not installed; install it with: pip install '.[{extra}]' in a clone\n"


@pytest.mark.parametrize("name", ["worker", "gateway"])
async def test_otel_without_its_extra_is_one_line_that_says_what_to_install(name: str) -> None:
    options = ["--otel", "on", *(["--model", "demo"] if name == "worker" else [])]
    outcome = await penstock(name, *options, "--log-format", "console", code=WITHOUT.format("opentelemetry.sdk"))
    assert outcome.status == 1
    assert outcome.err == (
        "penstock: opentelemetry.sdk is not installed; install it with: pip install '.[otel]' in a clone\n"
    )


async def test_an_exporter_that_is_not_there_ends_a_gateway_before_its_processes() -> None:
    outcome = await penstock("gateway", "--otel", "on", "--workers", "2", OTEL_TRACES_EXPORTER="zipkin")
    assert outcome.status == 1
    assert outcome.err.startswith("penstock: OTEL_TRACES_EXPORTER is 'zipkin': no package for the exporter 'zipkin'")


def test_an_unknown_option_is_named() -> None:
    outcome = command("worker", "--max-num-seq", "3")
    assert outcome.status == 2
    assert "--max-num-seq" in outcome.err
    assert "--max-num-seqs" in outcome.err


def test_an_unknown_command_is_named() -> None:
    outcome = command("wroker")
    assert outcome.status == 2
    assert "wroker" in outcome.err


def test_an_unknown_variable_is_one_line() -> None:
    outcome = command("send", "hi", PENSTOCK_QUEU="x")
    assert (outcome.status, outcome.out) == (2, "")
    assert outcome.err == "penstock: unknown environment variable PENSTOCK_QUEU; did you mean PENSTOCK_QUEUE?\n"


def test_config_file_is_an_option(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text("que = 'x'")
    outcome = command("send", "hi", "--config", str(path))
    assert outcome.status == 2
    assert outcome.err == f"penstock: unknown setting 'que' in {path}; did you mean queue?\n"
