"""Checks that Redis is there, and that it is set up not to lose requests."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from redis import exceptions
from redis.asyncio import RedisCluster

from penstock.cli.checks import Finding
from penstock.cli.checks.redis_writes import check_state, check_write, fix_for, words_of
from penstock.protocol import keys
from penstock.protocol.redis.address import Address, parse_url
from penstock.protocol.redis.connection import RedisClient, connect
from penstock.protocol.redis.faults import is_away, is_no_group, is_not_permitted, may_pass
from penstock.serving import hints
from penstock.worker.redis import retries
from penstock.worker.redis.permissions import NAMED_AT_MOST, OPTIONAL, denied, optional_denied

MIN_VERSION = (7, 0)
"""Least version: before 7.0, XAUTOCLAIM returns deleted entries."""

REDIS_FIXED = {(7, 2): 16, (7, 4): 11, (8, 2): 9, (8, 4): 6, (8, 6): 6, (8, 8): 2, (8, 10): 1}
VALKEY_FIXED = {(7, 2): 14, (8, 0): 10, (8, 1): 9, (9, 0): 5, (9, 1): 1}
"""First patch release of each line without known remote code execution; docs/redis.md names the flaws."""


async def check_redis(url: str, queue: str) -> list[Finding]:
    """Checks the server, or each primary of a cluster, then one queue, and what the URL's user may do there."""
    address = parse_url(url)
    client = connect(address, decode=True, retries=0)
    found: list[Finding] = []
    looks = {
        "redis": partial(_servers, client, address),
        "writes": partial(check_write, client, queue),
        "permissions": partial(_permissions, client, queue),
        "queue": partial(_queue, client, queue),
        "dead letters": partial(_dead, client, queue),
    }
    try:
        for name, look in looks.items():
            try:
                found += await look()
            except retries.REDIS_ERRORS as error:
                if is_not_permitted(error):
                    found.append(Finding(name, "warn", f"this user may not look: {error}", hints.ROLES))
                elif may_pass(error) and not is_away(error) and found:  # the server's earlier answers say more
                    found.append(Finding(name, "fail", f"Redis refused: {words_of(error)}", fix_for(error)))
                else:
                    return [*found, _unusable(error, address)]
    finally:
        await client.aclose()
    return found


def _unusable(error: Exception, address: Address) -> Finding:
    what = "did not answer" if is_away(error) else "refused"
    return Finding("redis", "fail", f"Redis at {address} {what}: {words_of(error)}", fix_for(error))


async def _permissions(client: RedisClient, queue: str) -> list[Finding]:
    missing = await denied(client, queue)
    if not missing:
        without = [f"{name}: {OPTIONAL[name]}" for name in await optional_denied(client)]
        said = f"; it goes on without {'; without '.join(without)}" if without else ""
        return [Finding("permissions", "ok", f"all that a worker needs{said}")]
    detail = f"not for a worker, which would need {len(missing)} more: {', '.join(missing[:NAMED_AT_MOST])}"
    return [Finding("permissions", "warn", detail, hints.ROLES)]


async def _servers(client: RedisClient, address: Address) -> list[Finding]:
    if not isinstance(client, RedisCluster):
        info = await client.info()
        return [*_server(info, str(address)), *await check_state(client, info, str(address))]
    await client.initialize()
    findings = []
    for node in client.get_primaries():
        info = await client.info(target_nodes=node)
        findings += [*_server(info, node.name), *await check_state(client, info, node.name, node)]
    return findings


def _server(info: Mapping[str, Any], where: str) -> list[Finding]:
    return [_version(info, where), _policy(info), _persistence(info), *_role(info)]


def _version(info: Mapping[str, Any], where: str) -> Finding:
    version = str(info["redis_version"])
    product = f"Valkey {info['valkey_version']}" if "valkey_version" in info else f"Redis {version}"
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if numbers < MIN_VERSION:
        return Finding("redis", "fail", f"{product} at {where} is too old", "install Redis 7.0 or later, or Valkey")
    if not _is_fixed(info):
        fix = "upgrade the server, or ask whoever packages it: docs/redis.md has the versions with fixes"
        return Finding("redis", "warn", f"{product} at {where} may lack fixes of flaws that let others run code", fix)
    return Finding("redis", "ok", f"{product} at {where}")


def _is_fixed(info: Mapping[str, Any]) -> bool:
    """Checks that the version has all known fixes; newer release lines do."""
    is_valkey = "valkey_version" in info
    lines = VALKEY_FIXED if is_valkey else REDIS_FIXED
    version = str(info["valkey_version" if is_valkey else "redis_version"])
    major, minor, patch, *_ = (*(int(part) for part in re.findall(r"\d+", version)), 0, 0, 0)
    return (major, minor) > max(lines) or patch >= lines.get((major, minor), math.inf)


def _policy(info: Mapping[str, Any]) -> Finding:
    policy = info.get("maxmemory_policy")
    if policy == "noeviction":
        return Finding("maxmemory-policy", "ok", "noeviction")
    return Finding(
        "maxmemory-policy",
        "fail",
        f"{policy}: when memory is full, Redis drops requests and replies",
        "redis-cli CONFIG SET maxmemory-policy noeviction, and the same in redis.conf",
    )


def _persistence(info: Mapping[str, Any]) -> Finding:
    if info.get("aof_enabled"):
        return Finding("appendonly", "ok", "yes")
    return Finding(
        "appendonly",
        "warn",
        "no: a restart of Redis loses requests and replies",
        "redis-cli CONFIG SET appendonly yes, and the same in redis.conf",
    )


def _role(info: Mapping[str, Any]) -> list[Finding]:
    if info.get("role") == "master":
        return []
    return [
        Finding(
            "role",
            "fail",
            "this server is a replica: it takes no requests",
            "use the URL of its primary, or redis+sentinel://",
        )
    ]


async def _queue(client: RedisClient, queue: str) -> list[Finding]:
    return [await _backlog(client, queue)]


async def _backlog(client: RedisClient, queue: str) -> Finding:
    stream = keys.requests(queue)
    try:
        groups = await client.xinfo_groups(stream)
    except exceptions.ResponseError as error:
        if not is_no_group(error):
            raise
        return Finding("queue", "ok", f"{queue}: nothing was sent to it yet")
    group = next((group for group in groups if group["name"] == keys.GROUP), None)
    if group is None:
        return Finding("queue", "ok", f"{queue}: {await client.xlen(stream)} waiting, no worker has joined yet")
    consumers = [consumer["name"] for consumer in await client.xinfo_consumers(stream, keys.GROUP)]
    live = [name for name in consumers if await client.exists(keys.heartbeat(queue, name))]
    waiting = await client.xlen(stream) - group["pending"]
    detail = f"{queue}: {waiting} waiting, {group['pending']} taken, {len(live)} live workers"
    if (waiting or group["pending"]) and not live:
        return Finding("queue", "warn", detail, "start a worker: penstock worker --model PATH")
    return Finding("queue", "ok", detail)


async def _dead(client: RedisClient, queue: str) -> list[Finding]:
    return [await _letters(client, queue)]


async def _letters(client: RedisClient, queue: str) -> Finding:
    num_dead = await client.xlen(keys.dead(queue))
    num_malformed = await client.xlen(keys.malformed(queue))
    if not (num_dead or num_malformed):
        return Finding("dead letters", "ok", "none")
    if not num_dead:
        look = "look at them: penstock dead list --malformed"
        return Finding("dead letters", "warn", f"{num_malformed} entries were not requests", look)
    also = f", {num_malformed} entries were not requests" if num_malformed else ""
    return Finding(
        "dead letters", "warn", f"{num_dead} requests were given up{also}", "look at them: penstock dead list"
    )
