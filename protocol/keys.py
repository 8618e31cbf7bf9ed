"""Every Redis key Penstock uses, and nothing else.

The braces are Redis Cluster hash tags: all keys of one queue share a slot, all keys of one request share another. A
script may touch keys of one of the two, never of both; `queues` belongs to no queue and stands alone. A request's id
belongs to its queue: two queues may hand out the same one for unrelated requests, as entry ids are unique only within a
stream.
"""

GROUP = "workers"
"""The consumer group on every request stream, and on every stream of calls."""

UNOWNED = "unowned"
"""The consumer that holds entries handed back or taken from a dead worker, until a worker with capacity takes them."""

WAITING = "waiting"
"""The consumer that holds entries placed in lanes. The lanes are an index of what is pending for it."""

HOLDERS = (UNOWNED, WAITING)
"""The consumers that are not processes, and hold entries until somebody takes them."""

GATEWAY = "gateway"
"""A name that no queue may have: the gateway's own keys, `penstock:gateway:{...}:NAME`, would be taken for requests'
keys.
"""


def requests(queue: str) -> str:
    """The stream that requests of `queue` wait in."""
    return f"penstock:{{{queue}}}:requests"


def lane(queue: str, tenant: str = "") -> str:
    """A sorted set of the waiting entries of `tenant`, the next one first. Requests without a tenant share one lane.

    Members are NUMBER-MS/BYTES/SLOT, scores `(1000 - priority) * 2^42 +` the deadline (ms).
    """
    return f"penstock:{{{queue}}}:lanes:tenant:{tenant}"


def band(queue: str, priority: int | str = "") -> str:
    """A sorted set of the tenants whose next entry has this priority, by the service they have had."""
    return f"penstock:{{{queue}}}:lanes:band:{priority}"


def bands(queue: str) -> str:
    """A sorted set of the priorities of waiting requests."""
    return f"penstock:{{{queue}}}:lanes:bands"


def service(queue: str) -> str:
    """A sorted set of the tenants that do not wait, by the service they have had: tokens divided by their weight.

    It keeps those served more than a waiting tenant, at most 100,000, or 100 if none waits.
    """
    return f"penstock:{{{queue}}}:lanes:service"


def weights(queue: str) -> str:
    """A hash of the tenants whose weight is not 1. Its field `/floor` is the service of the last tenant to leave.

    A value that is not a number above 0 counts as 1.
    """
    return f"penstock:{{{queue}}}:lanes:weights"


def charged(queue: str) -> str:
    """A hash of entries that workers have or had, by what their tenants have been charged for them so far.

    Their place follows: TENANT/PRIORITY/TIMEOUT/BYTES/SLOT/ID.
    """
    return f"penstock:{{{queue}}}:lanes:charged"


def due(queue: str) -> str:
    """A sorted set of waiting entries that have a `timeout_s`, by when they expire (ms); 0: it was cancelled."""
    return f"penstock:{{{queue}}}:lanes:due"


def backlog(queue: str) -> str:
    """A hash with the numbers of entries and bytes that wait in each priority.

    `cursor` and `last` are there while they are counted again. `overtakes` is the oldest entry that has waited for 5 s,
    and how often it was overtaken.
    """
    return f"penstock:{{{queue}}}:lanes:backlog"


def load(queue: str) -> str:
    """A hash of numbers for autoscaling, at most seconds old while a worker lives. `protocol.queue.load` reads it."""
    return f"penstock:{{{queue}}}:lanes:load"


def workers(queue: str) -> str:
    """A hash of what each worker can do, as it reports once a second."""
    return f"penstock:{{{queue}}}:lanes:workers"


def passed(queue: str) -> str:
    """A sorted set of entries that are left to the worker they have affinity with, by the time when that began."""
    return f"penstock:{{{queue}}}:lanes:passed"


def homes(queue: str) -> str:
    """A hash of slots by the worker that is to run them. Prompts that begin alike share a slot."""
    return f"penstock:{{{queue}}}:lanes:homes"


def room(queue: str) -> str:
    """A sorted set of workers by how many more sequences each can take."""
    return f"penstock:{{{queue}}}:lanes:room"


def nudges(queue: str, worker: str = "") -> str:
    """A stream that wakes `worker` where it waits for new entries. Expires with its heartbeat."""
    return f"penstock:{{{queue}}}:lanes:nudges:{worker}"


def named(queue: str) -> str:
    """A hash from request ids to entries, for waiting requests whose entry has an `id`."""
    return f"penstock:{{{queue}}}:lanes:named"


def asked(queue: str) -> str:
    """A sorted set of ids that a sweep just found in `cancelled`, by when (ms). Expires a day after the last one."""
    return f"penstock:{{{queue}}}:lanes:asked"


def aside(queue: str, kind: str = "") -> str:
    """A sorted set of the entries that are left to workers of one kind (`consumers`), the next one first."""
    return f"penstock:{{{queue}}}:lanes:aside:{kind}"


def orphaned(queue: str) -> str:
    """A sorted set of entries by when they lost their worker. Some are left to workers that round alike, for a time."""
    return f"penstock:{{{queue}}}:lanes:orphaned"


def alike(queue: str, kind: str) -> str:
    """A sorted set of the workers with one model and arithmetic that serve, by when their heartbeats lapse."""
    return f"penstock:{{{queue}}}:lanes:alike:{kind}"


def lapses(queue: str) -> str:
    """A sorted set of workers by when their heartbeats lapse, or lapsed within the hour."""
    return f"penstock:{{{queue}}}:lanes:lapses"


def cancelled(queue: str) -> str:
    """A set of ids of requests that somebody asked to cancel, possibly while they waited."""
    return f"penstock:{{{queue}}}:cancelled"


def seen(queue: str, request_id: str) -> str:
    """Marks a request id as enqueued, so that a retried enqueue adds no second entry.

    It holds the id of the entry, or `NO_ENTRY` once the entry has left the queue and the reply has its end.
    """
    return f"penstock:{{{queue}}}:seen:{request_id}"


NO_ENTRY = "0-0"
"""An id that no stream entry can have."""


def dead(queue: str) -> str:
    """The stream of requests that were given up, mostly because they kept crashing workers."""
    return f"penstock:{{{queue}}}:dead"


def malformed(queue: str) -> str:
    """The stream of entries that could not be read as a request: kept apart, so that they displace no dead letters."""
    return f"penstock:{{{queue}}}:malformed"


def letter_sizes(letters: str) -> str:
    """A stream that holds the size in bytes of each letter of `letters` (`dead` or `malformed`), under its id."""
    return f"{letters}:sizes"


def letter_bytes(letters: str) -> str:
    """The sum of `letter_sizes`."""
    return f"{letters}:bytes"


def heartbeat(queue: str, worker: str) -> str:
    """Exists while `worker` lives; its time to live is the longest silence before others take over."""
    return f"penstock:{{{queue}}}:worker:{worker}"


def looked(queue: str) -> str:
    """Exists for a while after a worker has looked for dead workers."""
    return f"penstock:{{{queue}}}:looked"


def serving(queue: str) -> str:
    """Exists while a worker serves `queue`: a sorted set of its workers by when their heartbeats lapse."""
    return f"penstock:{{{queue}}}:serving"


def card(queue: str) -> str:
    """The hash that describes what the workers of `queue` serve. Deleted with the last of them."""
    return f"penstock:{{{queue}}}:card"


def digests(queue: str) -> str:
    """A hash from each worker of `queue` to the digest of its model (`ModelCard.digest`)."""
    return f"penstock:{{{queue}}}:digests"


def queues() -> str:
    """A sorted set of the queues that are served, by when the last heartbeat lapses; in a slot of its own."""
    return "penstock:queues"


def calls(queue: str) -> str:
    """The stream that calls (`count_tokens`, ...) wait in. Workers answer them while they generate."""
    return f"penstock:{{{queue}}}:calls"


def answers(queue: str, mailbox: str) -> str:
    """The stream that receives answers to the calls that name `mailbox`. Expires by itself."""
    return f"penstock:{{{queue}}}:answers:{mailbox}"


def report(queue: str, worker: str) -> str:
    """A worker's report on itself and on its requests, twice a second: see `protocol.operations.reports`.

    Only operators may read it: it holds request ids, which grant the right to read and to cancel. It expires.
    """
    return f"penstock:{{{queue}}}:report:{worker}"


def reports(queue: str) -> str:
    """A sorted set of the workers that have a report, or had one lately, by when they are forgotten."""
    return f"penstock:{{{queue}}}:reports"


def starting(queue: str, worker: str) -> str:
    """Exists while a process that is to be `worker` loads its model: it has the name, but no heartbeat yet.

    No worker's heartbeat can have this key: worker names have no slash.
    """
    return f"penstock:{{{queue}}}:worker:{worker}/starting"


def drain(queue: str, worker: str) -> str:
    """Names the process that is to drain, by its heartbeat's value, so that a later one of this name is not drained."""
    return f"penstock:{{{queue}}}:drain:{worker}"


def reply(queue: str, request_id: str) -> str:
    """The stream that the reply to a request is written to."""
    return f"penstock:{queue}:{{{request_id}}}:reply"


def state(queue: str, request_id: str) -> str:
    """The hash of a request's owner (`entry`, `epoch`, `worker`) and `status`: running, queued (given back), done or
    dead.
    """
    return f"penstock:{queue}:{{{request_id}}}:state"


def cancel(queue: str, request_id: str) -> str:
    """Exists once somebody asked to cancel the request."""
    return f"penstock:{queue}:{{{request_id}}}:cancel"


def wake(client_id: str) -> str:
    """A client's own stream, which it appends to when its blocked read must start again. Expires by itself.

    It belongs to no queue, so its prefix differs from theirs: an ACL pattern for it matches no queue's keys.
    """
    return f"penstock:wake:{{{client_id}}}"
