"""Ends processes that tests start."""

from __future__ import annotations

import asyncio


async def ended(process: asyncio.subprocess.Process) -> None:
    """Kills a process, unless it has ended."""
    if process.returncode is None:
        process.kill()
        await process.wait()
