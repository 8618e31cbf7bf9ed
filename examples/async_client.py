"""The asyncio client: two replies at once, a reply continued from where a reader stopped, and a cancelled request.

PENSTOCK_REDIS_URL=redis://localhost:6379 PENSTOCK_QUEUE=default python examples/async_client.py
"""

import asyncio
import os

from penstock import AsyncClient, PenstockError


async def main() -> None:
    async with AsyncClient(queue=os.environ.get("PENSTOCK_QUEUE", "default")) as client:  # the URL: PENSTOCK_REDIS_URL
        first, second = await asyncio.gather(
            client.generate("What is 2 + 3?", max_tokens=16),
            client.generate("What is 20 + 30?", max_tokens=16),
        )
        print("at once:", first.text, "|", second.text)

        handle = await client.submit("Tell me a story.", max_tokens=64)
        async with handle.stream() as chunks:
            chunk = await anext(chunks)
            print("begun:", chunk.text)
        # Any process that knows the id can continue reading, now or after a restart.
        rest = client.handle(handle.id).stream(after=chunk.entry_id)
        print("continued:", "".join([chunk.text async for chunk in rest]))

        handle = await client.submit("Tell me a very long story.", max_tokens=4096)
        await handle.cancel()
        reply = await handle.result(timeout=60)
        print("cancelled:", reply.finish_reason)


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except PenstockError as error:
        raise SystemExit(str(error)) from error
