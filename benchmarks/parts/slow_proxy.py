"""A TCP proxy that makes Redis seem far away: every byte arrives `delay_s` later, and no faster than `bytes_per_s`.

    python -m benchmarks.parts.slow_proxy HOST PORT DELAY_S BYTES_PER_S

Prints the port it listens on, and serves until its standard input ends.
"""

from __future__ import annotations

import asyncio
import sys


async def serve(host: str, port: int, delay_s: float, bytes_per_s: float) -> None:
    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection(host, port)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(pump(reader, server_writer, delay_s, bytes_per_s))
                group.create_task(pump(server_reader, writer, delay_s, bytes_per_s))
        except* (OSError, asyncio.CancelledError):  # one end is gone, or the proxy is told to end
            pass
        finally:
            writer.close()
            server_writer.close()

    server = await asyncio.start_server(connect, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    server.close()


async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter, delay_s: float, bytes_per_s: float) -> None:
    """Keeps reading while earlier bytes are under way."""
    loop = asyncio.get_running_loop()
    under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(maxsize=64)

    async def deliver() -> None:
        while True:
            due_s, data = await under_way.get()
            await asyncio.sleep(due_s - loop.time())
            if not data:
                target.close()
                return
            target.write(data)
            await target.drain()

    async with asyncio.TaskGroup() as group:
        group.create_task(deliver())
        free_s = loop.time()
        data = b"-"
        while data:
            data = await source.read(65_536)
            free_s = max(free_s, loop.time()) + len(data) / bytes_per_s
            await under_way.put((free_s + delay_s, data))


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])))
