"""Checks whether Redis accepts writes, and will keep accepting them."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from typing import Any

from redis import exceptions
from redis.asyncio import RedisCluster

from penstock.cli.checks import Finding
from penstock.protocol import keys
from penstock.protocol.ids import new_id
from penstock.protocol.redis.connection import RedisClient
from penstock.protocol.redis.faults import code_of, is_away, is_not_permitted, may_pass
from penstock.serving import hints

NEARLY_FULL = 0.9  # share of maxmemory
WRITTEN_MS = 1  # lifetime of a test key
MAX_TRIES = 1000  # random names to try for a key on a given node of a cluster

_MAKE_SPACE = "make space on the server's disk: docs/redis.md has what may be removed"
_MORE_MEMORY = "redis-cli CONFIG SET maxmemory BYTES, or let the backlog go down: docs/redis.md"
_MORE_REPLICAS = "bring the replicas back, or redis-cli CONFIG SET min-replicas-to-write 0"
_PRIMARY = "use the URL of its primary, or redis+sentinel://"
_WAIT = "wait until it has read its data"
_FIXES = {
    "MISCONF": _MAKE_SPACE,
    "OOM": _MORE_MEMORY,
    "NOREPLICAS": _MORE_REPLICAS,
    "READONLY": _PRIMARY,
    "MASTERDOWN": _PRIMARY,
    "LOADING": _WAIT,
    "BUSY": "a script runs for long: redis-cli SCRIPT KILL ends one that has written nothing",
    "CLUSTERDOWN": "redis-cli CLUSTER INFO says which slots nobody serves",
}

_SETTINGS = ("min-replicas-to-write", "stop-writes-on-bgsave-error", "save")


def fix_for(error: Exception) -> str:
    """Returns what to do about a refusal."""
    return _FIXES.get(code_of(error), hints.hint_for(error))


def words_of(error: Exception) -> str:
    """Returns the server's words with the code, which the Redis library strips if it knows it."""
    text, code = str(error).rstrip("."), code_of(error)
    return text if text.startswith(code) else f"{code} {text}"


async def check_state(client: RedisClient, info: Mapping[str, Any], where: str, node: Any = None) -> list[Finding]:
    """Checks disk, memory and replicas in a server's INFO.

    Args:
        client: connected to the server.
        info: all sections.
        where: the server's address.
        node: of a cluster, if it is one.
    """
    settings, found = await _settings(client, node)
    return [*found, *_loading(info, where), *_disk(info, settings, where), _memory(info, where),
            *_replicas(info, settings, where)]  # fmt: skip


async def check_write(client: RedisClient, queue: str) -> list[Finding]:
    """Writes a key that expires at once to each primary."""
    if not isinstance(client, RedisCluster):
        return [await _written(client, [keys.drain(queue, _name()), keys.cancel(queue, new_id())], "")]
    await client.initialize()
    return [
        await _written(client, _keys_on(client, node, queue), f" on {node.name}") for node in client.get_primaries()
    ]


def _keys_on(client: RedisCluster, node: Any, queue: str) -> list[str]:
    """Returns two keys on a node: one that workers and operators may write, one that clients may."""
    drains = (keys.drain(name, _name()) for name in (queue, *(_name() for _ in range(MAX_TRIES))))
    cancels = (keys.cancel(queue, new_id()) for _ in range(MAX_TRIES))
    found = [
        next((key for key in candidates if client.get_node_from_key(key) is node), None)
        for candidates in (drains, cancels)
    ]
    return [key for key in found if key is not None]


async def _written(client: RedisClient, candidates: list[str], where: str) -> Finding:
    denied = ""
    for key in candidates:
        try:
            await client.set(key, "", px=WRITTEN_MS)
        except exceptions.RedisError as error:
            if is_not_permitted(error):
                denied = f": {words_of(error)}"
                continue
            if is_away(error) or not may_pass(error):
                raise
            return Finding("writes", "fail", f"Redis refuses them{where}: {words_of(error)}", fix_for(error))
        return Finding("writes", "ok", f"a key was written{where}, which expires at once")
    detail = f"not tried{where}, this user may write nothing that could be tried{denied}"
    return Finding("writes", "warn", detail, hints.ROLES)


async def _settings(client: RedisClient, node: Any) -> tuple[Mapping[str, str] | None, list[Finding]]:
    """Returns the server's settings; None: unknown."""
    target = {} if node is None else {"target_nodes": node}
    try:
        there: Any = await client.config_get(*_SETTINGS, **target)
    except exceptions.ResponseError as error:
        if may_pass(error):
            raise
        detail = f"CONFIG is not for this user, and what {', '.join(_SETTINGS)} are is not known: {error}"
        return None, [Finding("settings", "warn", detail, "look again as a user who may read CONFIG")]
    return there, []


def _loading(info: Mapping[str, Any], where: str) -> Iterator[Finding]:
    if info.get("loading"):
        share = info.get("loading_loaded_perc", "?")
        yield Finding("loading", "warn", f"{where} reads its data from disk ({share} %) and serves nothing yet", _WAIT)


def _disk(info: Mapping[str, Any], settings: Mapping[str, str] | None, where: str) -> Iterator[Finding]:
    if info.get("aof_enabled") and info.get("aof_last_write_status", "ok") != "ok":
        yield Finding("disk", "fail", f"{where} cannot write its append-only file, and refuses writes", _MAKE_SPACE)
    elif info.get("rdb_last_bgsave_status", "ok") != "ok":
        yield _failed_snapshot(settings, where)
    elif info.get("aof_enabled") and info.get("aof_last_bgrewrite_status", "ok") != "ok":
        yield Finding("disk", "warn", f"{where} could not rewrite its append-only file, which grows", _MAKE_SPACE)
    else:
        yield Finding("disk", "ok", f"{where} could write to it")


def _failed_snapshot(settings: Mapping[str, str] | None, where: str) -> Finding:
    failed = f"the last snapshot of {where} failed"
    if settings is None:
        return Finding(
            "disk", "warn", f"{failed}: it refuses writes if stop-writes-on-bgsave-error is set", _MAKE_SPACE
        )
    if settings.get("stop-writes-on-bgsave-error") == "yes" and settings.get("save"):
        return Finding("disk", "fail", f"{failed}: it refuses writes (stop-writes-on-bgsave-error)", _MAKE_SPACE)
    return Finding("disk", "warn", failed, _MAKE_SPACE)


def _memory(info: Mapping[str, Any], where: str) -> Finding:
    limit = int(info.get("maxmemory", 0))
    used = int(info.get("used_memory", 0)) - int(info.get("mem_not_counted_for_evict", 0))
    mib = f"{used / 2**20:.0f} MiB"
    if not limit:
        return Finding("memory", "ok", f"{where} uses {mib}, and has no maxmemory")
    detail = f"{where} uses {mib} of {limit / 2**20:.0f} MiB (maxmemory)"
    if used >= limit:
        return Finding("memory", "fail", f"{detail}: it refuses writes", _MORE_MEMORY)
    return (
        Finding("memory", "warn", detail, _MORE_MEMORY)
        if used > NEARLY_FULL * limit
        else Finding("memory", "ok", detail)
    )


def _replicas(info: Mapping[str, Any], settings: Mapping[str, str] | None, where: str) -> Iterator[Finding]:
    """Checks replicas; INFO counts good ones only if min-replicas-to-write is set."""
    good = info.get("min_slaves_good_slaves")
    if good is None:
        return
    needed = 1 if settings is None else int(settings.get("min-replicas-to-write", 1))
    asked = f"min-replicas-to-write is {'not known' if settings is None else needed}"
    detail = f"{where} has {good} good replicas, {asked}"
    if int(good) < needed:
        yield Finding("replicas", "fail", f"{detail}: it refuses writes", _MORE_REPLICAS)
    else:
        yield Finding("replicas", "ok", detail)


def _name() -> str:
    """Returns an unused name for a worker or queue."""
    return f"doctor-{secrets.token_hex(8)}"
