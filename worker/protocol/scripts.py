"""The multi-key steps of the delivery protocol, as Lua scripts. Each touches keys of one hash slot only.

Every function here returns one command, ready for `execute_command` or a pipeline, that holds the whole script (EVAL),
so that no server must be prepared; `producer.pipeline.execute` sends its hash to those that know it. The path of tokens
has no script at all.

On the state hash of a request:
    entry             the queue entry this request came with; another entry with the same id is a duplicate
    epoch             of the last claim, the fencing token: reply entries are `<epoch>-<n>`, so Redis refuses those of
                      earlier claims
    worker, instance  who claimed it last; the instance tells a restarted worker from the one that died
    status            running, queued (handed back), done, dead
    claimed_ms        server time of the first claim
    attempts          claims
    crashes           claims that ended with the worker's death, as far as it has not come back
    strikes           crashes in a row between which the reply did not grow, counting the first
    handbacks         claims that a draining worker gave back
    alive:<epoch>     the owner of that claim was frozen, not dead

An epoch is the server's clock in microseconds. Redis may forget its last writes, by a failover or a power cut; an epoch
counted up from what is left would be given a second time, and two owners would take each other's entries for their own.
Where the clock is behind what the reply or the state holds, the epoch leaps ahead of that by a random distance instead.
So epochs rise, and no two claims share one, whatever was rolled back; and since two servers' clocks could agree to the
microsecond, an owner is always asked for its instance too.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from penstock.producer import keys
from penstock.producer.pipeline import Command

Fields: TypeAlias = Sequence[str]
"""Field, value, field, value, ..."""

MAX_EPOCH = 2**53 - 2**30
"""No claim takes a higher one: Lua's numbers are exact up to 2**53, which the clock reaches in the year 2255."""

_LEAP_BITS = 26  # 67 s: epochs are of the clock again soon after

_CLAIM = """
local state, reply, cancel = KEYS[1], KEYS[2], KEYS[3]
local entry, worker, instance, ttl, gone, leap, max_epoch = unpack(ARGV)
local s = redis.call('HMGET', state, 'status', 'entry', 'epoch', 'instance')
local status, owner_entry, owner_epoch, owner_instance = unpack(s)
if status == 'dead' and owner_entry == entry then return {'dead'} end
if status == 'done' or status == 'dead' then return {'done'} end
if owner_entry and owner_entry ~= entry and owner_entry ~= gone then return {'duplicate', owner_entry} end
max_epoch = tonumber(max_epoch)
local highest, progress = tonumber(owner_epoch or 0), false
if not highest or highest ~= highest or highest < 0 or highest > max_epoch then highest = 0 end
local last = redis.call('XREVRANGE', reply, '+', '-', 'COUNT', 1)[1]
if last then
  local kind
  for i = 1, #last[2], 2 do
    if last[2][i] == 'type' then kind = last[2][i + 1] end
  end
  if kind == 'end' then return {'done'} end
  local last_epoch = tonumber(string.match(last[1], '^%d+'))
  if last_epoch > max_epoch then return {'unwritable'} end
  progress = kind == 'chunk' and last_epoch == highest
  highest = math.max(highest, last_epoch)
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local epoch = time[1] * 1000000 + time[2]
if epoch <= highest then epoch = math.floor(highest) + 1 + leap end
epoch = string.format('%d', epoch)
local turn = string.format('%d', (tonumber(redis.call('HMGET', state, 'attempts')[1] or 0) or 0) + 1)
redis.call('XADD', reply, epoch .. '-0', 'type', 'own', 'worker', worker, 'epoch', epoch, 'turn', turn)
if status == 'running' and owner_instance ~= instance then
  redis.call('HINCRBY', state, 'crashes', 1)
  if progress then
    redis.call('HSET', state, 'strikes', 1)
  else
    redis.call('HINCRBY', state, 'strikes', 1)
  end
end
redis.call('HSET', state, 'status', 'running', 'entry', entry, 'epoch', epoch, 'worker', worker,
  'instance', instance, 'attempts', turn)
redis.call('HSETNX', state, 'claimed_ms', string.format('%d', now))
redis.call('PEXPIRE', state, ttl)
redis.call('PEXPIRE', reply, ttl)
local answer = {'ok', tonumber(epoch), last and 1 or 0, redis.call('EXISTS', cancel), now}
local counts = redis.call('HMGET', state, 'claimed_ms', 'attempts', 'crashes', 'strikes', 'handbacks')
for i = 1, #counts do answer[i + 5] = tonumber(counts[i] or 0) end
return answer
"""

_FINISH = """
local state, reply, cancel = KEYS[1], KEYS[2], KEYS[3]
local epoch, instance, last, status, ttl = unpack(ARGV, 1, 5)
local s = redis.call('HMGET', state, 'epoch', 'instance', 'status')
if s[1] ~= epoch or s[2] ~= instance then return 'fenced' end
if s[3] == 'done' or s[3] == 'dead' then return 'already' end
local newest = redis.call('XREVRANGE', reply, '+', '-', 'COUNT', 1)[1]
if not newest or newest[1] ~= epoch .. '-' .. last then return 'lost' end
local at = 6
while ARGV[at] do  -- one reply entry at a time: unpack takes a few thousand values, and the schema has few fields
  local count = tonumber(ARGV[at + 1])
  redis.call('XADD', reply, epoch .. '-' .. ARGV[at], unpack(ARGV, at + 2, at + 1 + count))
  at = at + 2 + count
end
redis.call('HSET', state, 'status', status)
redis.call('PEXPIRE', state, ttl)
redis.call('PEXPIRE', reply, ttl)
redis.call('DEL', cancel)
return 'ok'
"""

_END_UNCLAIMED = """
local ttl, max_epoch = ARGV[1], tonumber(ARGV[2])
local time = redis.call('TIME')
local epoch = time[1] * 1000000 + time[2]
local last = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)[1]
if last then
  for i = 1, #last[2], 2 do
    if last[2][i] == 'type' and last[2][i + 1] == 'end' then return 'already' end
  end
  epoch = math.max(epoch, tonumber(string.match(last[1], '^%d+')) + 1)
end
if epoch > max_epoch then return 'unwritable' end
redis.call('XADD', KEYS[1], string.format('%d', epoch) .. '-0', unpack(ARGV, 3))  -- few fields: the schema bounds them
redis.call('PEXPIRE', KEYS[1], ttl)
return 'ok'
"""

_RETURN = """
local s = redis.call('HMGET', KEYS[1], 'epoch', 'status')
if s[1] ~= ARGV[1] or s[2] ~= 'running' then return 0 end
redis.call('HSET', KEYS[1], 'status', 'queued')
redis.call('HINCRBY', KEYS[1], 'handbacks', ARGV[2])
return 1
"""

_ABSOLVE = """
local state, epoch = KEYS[1], ARGV[1]
local s = redis.call('HMGET', state, 'epoch', 'status', 'strikes')
if not s[1] or s[1] == epoch or s[2] == 'done' or s[2] == 'dead' then return 0 end
if redis.call('HSETNX', state, 'alive:' .. epoch, 1) == 0 then return 0 end
if tonumber(redis.call('HMGET', state, 'crashes')[1] or 0) > 0 then redis.call('HINCRBY', state, 'crashes', -1) end
if tonumber(s[3] or 0) > 0 then redis.call('HINCRBY', state, 'strikes', -1) end
return 1
"""

_NEWEST = """
local s = redis.call('HMGET', KEYS[1], 'epoch', 'instance')
local newest = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)[1]
return {s[1], s[2], newest and newest[1]}
"""

_FIND = """
local s = redis.call('HMGET', KEYS[1], 'epoch', 'instance')
local found = redis.call('XRANGE', KEYS[2], ARGV[1], '+', 'COUNT', 1)[1]
return {s[1], s[2], found and found[1], found and found[2]}
"""

# XACK and XCLAIM check no owner by themselves: a worker that was frozen would acknowledge its successor's entry.
_OWNED = """
local function owned(requests, group, worker, entry)
  return #redis.call('XPENDING', requests, group, entry, entry, 1, worker) == 1
end
"""

_ACK = (
    _OWNED
    + """
local acked = 0
for i = 3, #ARGV do
  if owned(KEYS[1], ARGV[1], ARGV[2], ARGV[i]) then
    redis.call('XACK', KEYS[1], ARGV[1], ARGV[i])
    redis.call('XDEL', KEYS[1], ARGV[i])
    acked = acked + 1
  end
end
return acked
"""
)

# `sizes` has an entry for each letter, under the letter's id, as the worker may not read letters. The oldest letters go
# while a limit is passed, the new one stays whatever it takes. A letter that somebody deleted by hand counts until it
# would be the oldest.
_BURY = (
    _OWNED
    + """
local requests, letters, sizes, sum = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local group, worker, entry, size = unpack(ARGV, 1, 4)
local max_entries, max_bytes, ttl = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
if not owned(requests, group, worker, entry) then return 0 end
local letter = redis.call('XADD', letters, 'MAXLEN', '=', max_entries, '*', unpack(ARGV, 8))
redis.call('XACK', requests, group, entry)
redis.call('XDEL', requests, entry)

local bytes = redis.pcall('GET', sum)
bytes = type(bytes) == 'string' and string.match(bytes, '^%d+$') and tonumber(bytes)
local noted = bytes and redis.call('XLEN', letters) > 1 and redis.pcall('XADD', sizes, letter, 'bytes', size)
if type(noted) ~= 'string' then  -- the first letter, or somebody wrote here
  redis.call('DEL', sizes, sum)
  redis.call('XADD', sizes, letter, 'bytes', size)
  bytes = 0
end
bytes = bytes + size

local time, count, removed, oldest = redis.call('TIME'), redis.call('XLEN', sizes), 0, nil
local since = time[1] * 1000 + math.floor(time[2] / 1000) - ttl
while removed < 1000 do
  oldest = redis.call('XRANGE', sizes, '-', '+', 'COUNT', 1)[1]
  local is_old = tonumber(string.match(oldest[1], '^%d+')) < since
  if oldest[1] == letter or not (is_old or count > max_entries or bytes > max_bytes) then break end
  redis.call('XDEL', sizes, oldest[1])
  removed, count, bytes = removed + 1, count - 1, bytes - (tonumber(oldest[2][2]) or 0)
end
redis.call('XTRIM', letters, 'MINID', '=', oldest[1])
redis.call('SET', sum, string.format('%d', math.max(bytes, 0)), 'PX', ttl)
redis.call('PEXPIRE', sizes, ttl)
redis.call('PEXPIRE', letters, ttl)
return 1
"""
)

_DISOWN = (
    _OWNED
    + """
local released = 0
for i = 4, #ARGV do
  if owned(KEYS[1], ARGV[1], ARGV[2], ARGV[i]) then
    redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[3], 0, ARGV[i], 'JUSTID')
    released = released + 1
  end
end
return released
"""
)

# Entries are handed out as {id, bytes, whether all its fields are here, fields}, until they have `most` bytes together.
_WEIGHED = """
local group, worker, count, limit, most = unpack(ARGV, 1, 5)
local found, bytes = {}, 0
limit, most = tonumber(limit), tonumber(most)
local function hand_out(id, fields)
  local size, kept = 0, {}
  for i = 1, #fields do size = size + #fields[i] end
  bytes = bytes + size
  if size <= limit then
    found[#found + 1] = {id, size, 1, fields}
    return bytes < most
  end
  for i = 1, #fields, 2 do
    if fields[i] == 'id' then kept = {'id', string.sub(fields[i + 1], 1, 256)} end
  end
  found[#found + 1] = {id, size, 0, kept}
  return bytes < most
end
"""

_TAKE = (
    _WEIGHED
    + """
for _ = 1, count do
  local answer = redis.call('XREADGROUP', 'GROUP', group, worker, 'COUNT', 1, 'STREAMS', KEYS[1], '>')
  if not answer or not hand_out(answer[1][2][1][1], answer[1][2][1][2]) then break end
end
return found
"""
)

_ADOPT = (
    _WEIGHED
    + """
for _, item in ipairs(redis.call('XPENDING', KEYS[1], group, '-', '+', count, ARGV[6])) do
  local entry = redis.call('XCLAIM', KEYS[1], group, worker, 0, item[1])[1]
  if entry and not hand_out(entry[1], entry[2]) then break end
end
return found
"""
)

# The read beyond everything brings nothing, and makes the consumer known: Redis 7.0 does not list one that only waits.
_PENDING = (
    _WEIGHED
    + """
local ms, number = '18446744073709551615', '18446744073709551614'  -- one less than what '>' stands for
redis.call('XREADGROUP', 'GROUP', group, worker, 'COUNT', 1, 'STREAMS', KEYS[1], ms .. '-' .. number)
for _, item in ipairs(redis.call('XPENDING', KEYS[1], group, '(' .. ARGV[6], '+', count, worker)) do
  local entry = redis.call('XRANGE', KEYS[1], item[1], item[1])[1]
  if not hand_out(item[1], entry and entry[2] or {}) then break end
end
return found
"""
)

_RETIRE = """
local group, consumer, unowned, count = unpack(ARGV)
if redis.call('EXISTS', KEYS[2]) == 1 then return -1 end
local pending = redis.call('XPENDING', KEYS[1], group, '-', '+', count, consumer)
for _, item in ipairs(pending) do
  redis.call('XCLAIM', KEYS[1], group, unowned, 0, item[1], 'JUSTID')
end
if #redis.call('XPENDING', KEYS[1], group, '-', '+', 1, consumer) == 0 then
  redis.call('XGROUP', 'DELCONSUMER', KEYS[1], group, consumer)
end
return #pending
"""

# Whoever finds another instance in the key lets it stand: so of two processes of one name only one goes on. The key of
# those that serve expires with its last member, so that it exists as long as one of them lives.
_BEAT = """
local instance, ttl, worker, is_serving = unpack(ARGV)
local function read(key)
  local value = redis.pcall('GET', key)
  return type(value) == 'string' and value or ''  -- what is no string is none of ours
end
local holder = read(KEYS[1])
if holder ~= '' and holder ~= instance then
  local time = redis.call('TIME')
  return {holder, redis.call('PEXPIRETIME', KEYS[1]), time[1] * 1000 + math.floor(time[2] / 1000)}
end
redis.call('SET', KEYS[1], instance, 'PX', ttl)
local serving = KEYS[3]
if is_serving == '1' then
  local time = redis.call('TIME')
  local now = time[1] * 1000 + math.floor(time[2] / 1000)
  local entry = {'ZADD', serving, string.format('%d', now + ttl), worker}
  if type(redis.pcall(unpack(entry))) ~= 'number' then  -- somebody wrote something else here
    redis.call('DEL', serving)
    redis.call(unpack(entry))
  end
  redis.call('ZREMRANGEBYSCORE', serving, '-inf', string.format('%d', now))
  redis.call('PEXPIREAT', serving, redis.call('ZRANGE', serving, -1, -1, 'WITHSCORES')[2])
else
  redis.pcall('ZREM', serving, worker)
end
return {read(KEYS[2])}
"""

_LEAVE = """
local group, worker, instance = unpack(ARGV)
if redis.call('GET', KEYS[2]) ~= instance then return 0 end
redis.call('DEL', KEYS[2], KEYS[3])
redis.pcall('ZREM', KEYS[4], worker)
if redis.call('EXISTS', KEYS[1]) == 1 and #redis.call('XPENDING', KEYS[1], group, '-', '+', 1, worker) == 0 then
  redis.call('XGROUP', 'DELCONSUMER', KEYS[1], group, worker)
end
return 1
"""


@dataclass(frozen=True, slots=True)
class Claim:
    """What the claim script answered when the request is now this worker's."""

    epoch: int
    instance: str  # of the process that claimed
    has_journal: bool  # the reply had entries before: what earlier claims published
    is_cancelled: bool
    server_ms: int  # the server's clock at the claim
    first_server_ms: int  # the server's clock at the first claim of all
    attempts: int
    crashes: int
    strikes: int
    handbacks: int


@dataclass(frozen=True, slots=True)
class NotClaimed:
    """Why there is nothing to run: the reply has ended, another entry has the same request id, or the reply holds an
    entry id that no claim can go above.
    """

    reason: Literal["done", "dead", "duplicate", "unwritable"]
    other_entry: str = ""


@dataclass(frozen=True, slots=True)
class Standing:
    """How a request stands on the server."""

    owner: tuple[str, str] | None  # (epoch, instance) of the last claim
    entry_id: str | None  # of the reply entry that was asked for
    fields: tuple[bytes, ...] = ()  # of that entry

    def is_of(self, claim: Claim) -> bool:
        """Whether no other claim came after this one."""
        return self.owner == (str(claim.epoch), claim.instance)


@dataclass(frozen=True, slots=True)
class Rival:
    """Another process in the heartbeat key of this one's name."""

    instance: str
    expires_ms: int  # server time, later with each of its beats; -1: never
    server_ms: int  # the server's clock now

    @property
    def left_s(self) -> float:
        """Until the name is free, unless the rival beats again."""
        return max(1, self.expires_ms - self.server_ms) / 1000


def claim(
    queue: str, request_id: str, *, entry_id: str, worker: str, instance: str, ttl_ms: int, gone_entry: str = ""
) -> Command:
    """Takes a higher epoch of a request and locks out all earlier ones. Read the answer with `parse_claim`.

    Args:
        queue: where the entry was read.
        request_id: names the state, the reply stream and the cancel flag.
        entry_id: of the queue entry.
        worker: the consumer's name.
        instance: of the process.
        ttl_ms: the state and the reply stream expire after this.
        gone_entry: an earlier answer's `other_entry`, once it is known that no such entry exists.
    """
    leap = secrets.randbits(_LEAP_BITS)
    arguments = (entry_id, worker, instance, ttl_ms, gone_entry, leap, MAX_EPOCH)
    return _eval(_CLAIM, _request_keys(queue, request_id), arguments)


def parse_claim(answer: Any, instance: str) -> Claim | NotClaimed:
    """What the claim script answered to the process `instance`."""
    reason = answer[0].decode()
    if reason == "ok":
        epoch, has_journal, is_cancelled, *counts = answer[1:]
        return Claim(epoch, instance, bool(has_journal), bool(is_cancelled), *counts)
    if reason == "duplicate":
        return NotClaimed("duplicate", answer[1].decode())
    return NotClaimed(reason)


def finish(
    queue: str,
    request_id: str,
    *,
    claim: Claim,
    last_number: int,
    status: Literal["done", "dead"],
    ttl_ms: int,
    entries: Iterable[tuple[int, Fields]],
) -> Command:
    """Appends the last entries of a reply and closes it, all or nothing.

    Answers ok or already; fenced, if the request is another owner's; lost, if the reply does not end with what this
    owner wrote last.

    Args:
        queue: where the request came from.
        request_id: names the keys.
        claim: this worker's.
        last_number: n of the last entry that Redis has confirmed.
        status: what the request ends as.
        ttl_ms: how long the reply and the state are kept.
        entries: (n of `<epoch>-<n>`, fields) of each entry, the `end` last.
    """
    arguments: list[str | bytes | int] = [claim.epoch, claim.instance, last_number, status, ttl_ms]
    for number, fields in entries:
        arguments += (number, len(fields), *fields)
    return _eval(_FINISH, _request_keys(queue, request_id), arguments)


def end_unclaimed(queue: str, request_id: str, *, ttl_ms: int, fields: Fields) -> Command:
    """Ends the reply to a request that can't be claimed, unless it has ended. Answers ok, already or unwritable."""
    return _eval(_END_UNCLAIMED, (keys.reply(queue, request_id),), (ttl_ms, MAX_EPOCH, *fields))


def return_request(queue: str, request_id: str, *, epoch: int, handbacks: int) -> Command:
    """Says that the owner let go of the request in good health: 1, or 0 if it is not the owner.

    Should its worker die from now on, the request has no part in it. `handbacks` is added to its count.
    """
    return _eval(_RETURN, (keys.state(queue, request_id),), (epoch, handbacks))


def absolve(queue: str, request_id: str, *, epoch: int) -> Command:
    """Takes back the crash that was counted when another worker claimed the request: its owner was only slow.

    Answers 1, or 0 if it was taken back already, or the request has ended.
    """
    return _eval(_ABSOLVE, (keys.state(queue, request_id),), (epoch,))


def newest(queue: str, request_id: str) -> Command:
    """Who owns a request and how far its reply goes; read the answer with `parse_standing`."""
    return _eval(_NEWEST, _request_keys(queue, request_id)[:2], ())


def find(queue: str, request_id: str, entry_id: str) -> Command:
    """As `newest`, with the first entry of the reply from `entry_id` on instead of the last one, and its fields."""
    return _eval(_FIND, _request_keys(queue, request_id)[:2], (entry_id,))


def parse_standing(answer: Any) -> Standing:
    epoch, instance, *entry = answer  # without the entry, if there is none: a nil in Lua ends the list
    return Standing(
        owner=None if epoch is None or instance is None else (epoch.decode(), instance.decode()),
        entry_id=entry[0].decode() if entry else None,
        fields=tuple(entry[1]) if len(entry) > 1 else (),
    )


def ack(queue: str, *, worker: str, entry_ids: Iterable[str]) -> Command:
    """Acknowledges and deletes those of `entry_ids` that are pending for `worker`; answers how many."""
    return _eval(_ACK, (keys.requests(queue),), (keys.GROUP, worker, *entry_ids))


@dataclass(frozen=True, slots=True)
class LetterLimits:
    """What a stream of dead letters holds at most. The newest letter stays, whatever it takes."""

    max_entries: int
    max_bytes: int  # names and values of all letters
    ttl_ms: int  # of a letter; where no other follows, it is kept for up to twice as long


def bury(
    queue: str, *, worker: str, entry_id: str, letters: str, limits: LetterLimits, fields: Sequence[str | bytes]
) -> Command:
    """Moves an entry that is pending for `worker` to a stream of dead letters: 1, or 0 if it is not pending for it.

    Args:
        queue: where the entry is.
        worker: whose it is.
        entry_id: of the queue entry.
        letters: `keys.dead` or `keys.malformed` of the queue.
        limits: what that stream may hold.
        fields: of the letter, at most some hundred.
    """
    size = sum(len(part) if isinstance(part, bytes) else len(part.encode()) for part in fields)
    key_names = (keys.requests(queue), letters, keys.letter_sizes(letters), keys.letter_bytes(letters))
    bounds = (limits.max_entries, limits.max_bytes, limits.ttl_ms)
    return _eval(_BURY, key_names, (keys.GROUP, worker, entry_id, size, *bounds, *fields))


def disown(queue: str, *, worker: str, entry_ids: Iterable[str]) -> Command:
    """Gives those of `entry_ids` that are pending for `worker` to whoever has room; answers how many."""
    return _eval(_DISOWN, (keys.requests(queue),), (keys.GROUP, worker, keys.UNOWNED, *entry_ids))


def take(queue: str, *, worker: str, count: int, max_body_bytes: int, max_bytes: int) -> Command:
    """Takes up to `count` new entries; `worker.delivery.entries` reads the answer.

    Args:
        queue: whose.
        worker: the consumer's name.
        count: of entries at most.
        max_body_bytes: of an entry that is larger only the size is told, and its `id`.
        max_bytes: no entry is taken once those before it have so many together.
    """
    return _eval(_TAKE, (keys.requests(queue),), (keys.GROUP, worker, count, max_body_bytes, max_bytes))


def adopt(queue: str, *, worker: str, count: int, max_body_bytes: int, max_bytes: int) -> Command:
    """As `take`, of the entries that nobody owns."""
    arguments = (keys.GROUP, worker, count, max_body_bytes, max_bytes, keys.UNOWNED)
    return _eval(_ADOPT, (keys.requests(queue),), arguments)


def pending(queue: str, *, worker: str, count: int, max_body_bytes: int, max_bytes: int, after: str) -> Command:
    """As `take`, of the entries pending for `worker`, from the one that follows `after` on."""
    arguments = (keys.GROUP, worker, count, max_body_bytes, max_bytes, after)
    return _eval(_PENDING, (keys.requests(queue),), arguments)


def retire(queue: str, *, consumer: str, count: int) -> Command:
    """Disowns up to `count` entries of a consumer whose heartbeat is gone, and removes it once it has none.

    Answers how many were disowned, or -1 if the consumer lives.
    """
    arguments = (keys.GROUP, consumer, keys.UNOWNED, count)
    return _eval(_RETIRE, (keys.requests(queue), keys.heartbeat(queue, consumer)), arguments)


def beat(queue: str, *, worker: str, instance: str, ttl_ms: int, is_serving: bool) -> Command:
    """Renews the heartbeat of `instance`, or sets it where there is none. Read the answer with `parse_beat`.

    The same step says to clients whether the worker serves the queue (`keys.serving`).
    """
    key_names = (keys.heartbeat(queue, worker), keys.drain(queue, worker), keys.serving(queue))
    return _eval(_BEAT, key_names, (instance, ttl_ms, worker, int(is_serving)))


def parse_beat(answer: Any) -> Rival | str:
    """Who has the name instead; else which instance was told to drain, "" if none was."""
    if len(answer) == 1:
        return str(answer[0], errors="replace")
    return Rival(str(answer[0], errors="replace"), *answer[1:])


def leave(queue: str, *, worker: str, instance: str) -> Command:
    """Removes the heartbeat of `instance`, the mark that told it to drain, and its consumer if nothing is pending."""
    key_names = (
        keys.requests(queue), keys.heartbeat(queue, worker), keys.drain(queue, worker), keys.serving(queue)
    )  # fmt: skip
    return _eval(_LEAVE, key_names, (keys.GROUP, worker, instance))


def _request_keys(queue: str, request_id: str) -> tuple[str, str, str]:
    return keys.state(queue, request_id), keys.reply(queue, request_id), keys.cancel(queue, request_id)


def _eval(script: str, key_names: Sequence[str], arguments: Iterable[str | bytes | int]) -> Command:
    return ("EVAL", script, len(key_names), *key_names, *arguments)
