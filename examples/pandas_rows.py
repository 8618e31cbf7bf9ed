"""Prompts from a column of a table, and their replies in new columns. Run again, it pays for nothing twice.

PENSTOCK_REDIS_URL=redis://localhost:6379 python examples/pandas_rows.py in.csv out.csv
"""

from __future__ import annotations

import sys

import pandas as pd

from penstock import Client, RowIds


def main(source: str, target: str) -> None:
    table = pd.read_csv(source)
    with Client() as client:
        results = client.map(table["prompt"], ids=RowIds.from_file(f"{target}.key"), temperature=0, progress=True)
        replies = pd.DataFrame([result.as_row() for result in results], index=table.index)
    table.join(replies.add_prefix("reply_")).to_csv(target, index=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
