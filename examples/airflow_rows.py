"""A task of Airflow that sends a file of rows through a queue. Tried again, it pays for nothing twice.

It lies in Airflow's folder of DAGs, and PENSTOCK_REDIS_URL is set where tasks run:

airflow dags test replies --conf '{"source": "in.jsonl", "target": "replies.jsonl"}'
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from airflow.sdk import dag, get_current_context, task

from penstock import Client, ConnectionLost, RowIds


@task(retries=3)
def generate() -> int:
    """Writes the rows with their replies, and returns how many there are."""
    files: dict[str, Any] = get_current_context()["params"]
    rows = [json.loads(line) for line in Path(files["source"]).read_text().splitlines()]
    ids = RowIds.from_file(f"{files['target']}.key")
    with Client() as client, Path(files["target"]).open("w") as target:
        for row, result in zip(rows, client.map([row["prompt"] for row in rows], ids=ids, temperature=0), strict=True):
            if isinstance(result.error, ConnectionLost):  # the next try joins what still runs
                raise result.error
            reply = {f"reply_{name}": value for name, value in result.as_row().items()}
            target.write(json.dumps({**row, **reply}) + "\n")
    return len(rows)


@dag(params={"source": "in.jsonl", "target": "replies.jsonl"}, schedule=None)
def replies() -> None:
    generate()


replies()
