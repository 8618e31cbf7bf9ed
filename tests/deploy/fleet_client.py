"""Runs the client library of the tree on PYTHONPATH, as a program: `fleet_client.py URL`.

Stdin is a JSON list of requests, which it sends all at once. Stdout is the list of their replies: for each choice its
tokens and text, or the name of the error.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from penstock.producer import AsyncClient, PenstockError


async def ask(client: AsyncClient, fields: dict[str, Any]) -> Any:
    try:
        reply = await client.generate(**fields)
    except PenstockError as error:
        return type(error).__name__
    return [[list(choice.tokens), choice.text] for choice in reply.choices]


async def main(url: str, requests: list[dict[str, Any]]) -> None:
    async with AsyncClient(url, queue="q") as client:
        json.dump(await asyncio.gather(*(ask(client, fields) for fields in requests)), sys.stdout)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], json.load(sys.stdin)))
