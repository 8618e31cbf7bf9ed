"""Writes docs/configuration.md from the settings: `python -m docs.scripts.settings_page > docs/configuration.md`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from pydantic.fields import FieldInfo

from penstock.cli.shared.programs import GATEWAY
from penstock.serving.setting_fields import default_text, group_of
from penstock.worker.settings import WORKER
from penstock.worker.settings_loading import CONFIG_VARIABLE, DEFAULT_CONFIG, FALLBACK_URL_VARIABLE, Program

_HEAD = f"""# Configuration

<!-- Written by `make docs` from worker/settings.py and gateway/settings.py; a test compares them. -->

A setting has one name in three places: `max_num_seqs` in a TOML file, `PENSTOCK_MAX_NUM_SEQS` in the environment,
`--max-num-seqs` on the command line. The command line overrides the environment, which overrides the file.

- `--config` names the file, else `{CONFIG_VARIABLE}`, else it is `{DEFAULT_CONFIG}` in the current folder, if there is
  one. A worker's settings are at its top level, a gateway's in the table `[gateway]`.
- An unknown key, option or `PENSTOCK_*` variable is an error; an empty variable counts as not set. On Kubernetes set
  `enableServiceLinks: false`, or a Service called `penstock` adds such variables.
- `{FALLBACK_URL_VARIABLE}` is taken where `redis_url` is set nowhere else.
- Sizes may have a unit, as in `512MiB`. `none` stands for no value. A TOML file has `true` and `false` for on and off.
- `penstock worker` and `penstock gateway` have an option for every setting; `penstock serve` for most of a worker's.
  `penstock send` has `--redis-url` and `--queue`, `penstock doctor` also `--model` and `--dtype`, `penstock demo`
  `--compile-cache-dir`.

```toml
# penstock.toml
redis_url = "redis://redis.internal:6379/0"
model = "/models/Qwen3-8B"
max_num_seqs = 128

[gateway]
host = "*"
```
"""

_GATEWAY_HEAD = f"""## Gateway

`port` is `PENSTOCK_GATEWAY_PORT` in the environment and `--port` on the command line of `penstock gateway`. Where
{", ".join(f"`{name}`" for name in sorted(GATEWAY.shared))} are not set for the gateway, those of the worker are taken.
[gateway.md](gateway.md) says what they do.
"""


def page() -> str:
    return "\n".join([_HEAD, *_tables(WORKER, "##"), _GATEWAY_HEAD, *_tables(GATEWAY, "###")])


def _tables(program: Program[Any], level: str) -> Iterator[str]:
    fields = program.settings.model_fields
    for group, names in groupby(fields, lambda name: group_of(fields[name])):
        rows = [_row(name, fields[name]) for name in names]
        yield "\n".join([f"{level} {group}", "", "| setting | default | meaning |", "| --- | --- | --- |", *rows, ""])


def _row(name: str, field: FieldInfo) -> str:
    default = default_text(field)
    return f"| `{name}` | {f'`{default}`' if default else ''} | {field.description} |"


if __name__ == "__main__":
    sys.stdout.write(page())
