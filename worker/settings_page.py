"""Writes docs/configuration.md from the settings: `python -m penstock.worker.settings_page > docs/configuration.md`."""

from __future__ import annotations

import sys
from itertools import groupby

from penstock.worker.settings import (
    CONFIG_VARIABLE,
    DEFAULT_CONFIG,
    FALLBACK_URL_VARIABLE,
    Settings,
    default_text,
    group_of,
)

_HEAD = f"""# Configuration

<!-- Written by `make docs` from worker/settings.py; a test compares the two. -->

A setting has one name in three places: `max_num_seqs` in a TOML file, `PENSTOCK_MAX_NUM_SEQS` in the environment,
`--max-num-seqs` on the command line. The command line goes before the environment, and that before the file.

- The file is the one that `--config` names, else `{CONFIG_VARIABLE}`, else `{DEFAULT_CONFIG}` in the current folder if
  it is there. Its settings stand at the top level, without tables.
- An unknown key, option or `PENSTOCK_*` variable is an error that names it; an empty variable counts as not set. On
  Kubernetes set `enableServiceLinks: false`, or a Service called `penstock` adds variables of that kind.
- `{FALLBACK_URL_VARIABLE}` is taken where `redis_url` is set nowhere else.
- Sizes may have a unit, as in `512MiB`. `none` stands for no value. A TOML file has `true` and `false` for on and off.
- `penstock worker` reads every setting. `penstock send` has options for `redis_url` and `queue`, `penstock doctor` also
  for `model` and `dtype`, `penstock demo` for `compile_cache_dir`.

```toml
# penstock.toml
redis_url = "redis://redis.internal:6379/0"
model = "/models/Qwen3-8B"
max_num_seqs = 128
```
"""


def page() -> str:
    """The whole page."""
    parts = [_HEAD]
    for group, names in groupby(Settings.model_fields, lambda name: group_of(Settings.model_fields[name])):
        rows = [_row(name) for name in names]
        lines = [f"## {group}", "", "| setting | default | meaning |", "| --- | --- | --- |", *rows, ""]
        parts.append("\n".join(lines))
    return "\n".join(parts)


def _row(name: str) -> str:
    field = Settings.model_fields[name]
    return f"| `{name}` | `{default_text(field)}` | {field.description} |"


if __name__ == "__main__":
    sys.stdout.write(page())
