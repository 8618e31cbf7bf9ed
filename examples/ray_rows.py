"""A data set of Ray through a queue. A task that Ray starts again, or a second run, pays for nothing twice.

PENSTOCK_REDIS_URL=redis://localhost:6379 python examples/ray_rows.py in.jsonl replies
"""

from __future__ import annotations

import sys

import pandas as pd
import ray

from penstock import Client, RowIds


class Generate:
    """Runs in an actor of Ray, with a client of its own. Equal rows of different batches share a reply."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._client = Client()

    def __call__(self, rows: pd.DataFrame) -> pd.DataFrame:
        ids = RowIds.from_file(self._key)
        replies = [result.as_row() for result in self._client.map(rows["prompt"], ids=ids, temperature=0)]
        return rows.join(pd.DataFrame(replies, index=rows.index).add_prefix("reply_"))


def main(source: str, target: str) -> None:
    rows = ray.data.read_json(source, file_extensions=None)
    replies = rows.map_batches(
        Generate,
        fn_constructor_args=(f"{target}.key",),
        batch_format="pandas",
        batch_size=64,
        concurrency=2,
        num_cpus=0,  # they only wait for the queue
    )
    replies.write_json(target)


if __name__ == "__main__":
    main(*sys.argv[1:])
