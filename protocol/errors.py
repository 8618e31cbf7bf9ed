"""Everything the client raises on purpose.

    PenstockError
    ├── BadAddress          (also ValueError)       the Redis URL can't be used
    ├── ConnectionLost      (also ConnectionError)  Redis can't be reached, or stayed away for too long
    ├── ServerRefused                               Redis answered with an error: no permission, out of memory
    ├── QueueFull                                   not enqueued: the queue holds its limit, of requests or of calls,
    │                                               or so much that the request would expire before its turn
    ├── TelemetryUnavailable                        tracing was asked for, and what it needs is not installed
    ├── NotDurable                                  enqueued, but Redis did not confirm that it is on disk
    ├── RequestRefused                              the request itself is wrong or over a limit; nothing was generated
    ├── RequestFailed                               generation ended in an error; holds what was generated before it
    ├── CallFailed                                  a worker could not answer a call, for no fault of the request
    ├── CallTimedOut        (also TimeoutError)     no worker answered a call within the time the caller gave
    ├── ReplyTimeout        (also TimeoutError)     the reply did not end within the time the caller gave
    ├── UnknownRequest      (also LookupError)      nobody has sent a request with this id to the queue
    ├── ReplyGone                                   the reply expired, or the cursor names an entry that is not in it
    └── ReplyCorrupt                                an entry of it is malformed, or tokens are missing

A reply that ends `cancelled` or `expired` is not an error: it comes back like any other, with that `finish_reason`
and the text so far.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.protocol.reply import Reply


class PenstockError(Exception):
    """The root of the tree: catch this to catch all of it."""


class BadAddress(PenstockError, ValueError):
    """The Redis URL can't be used. The message never shows the part that may hold a password."""


class ConnectionLost(PenstockError, ConnectionError):
    """Redis can't be reached. A request just sent may be enqueued or not: sending the same id again is safe."""


class ServerRefused(PenstockError):
    """Redis answered, but with an error.

    `is_passing`: its disk or memory is full, or it takes no writes for another reason that may pass, and the same may
    succeed later. Otherwise trying again would not cure it.

    `is_junk`: a key of Penstock's holds what Penstock never wrote there. Workers set that aside within seconds, except
    in a request's key or the stream that requests wait in.
    """

    def __init__(self, message: str, *, is_passing: bool = False, is_junk: bool = False) -> None:
        super().__init__(message)
        self.is_passing = is_passing
        self.is_junk = is_junk


class QueueFull(PenstockError):
    """Not enqueued: the queue holds `length` requests, waiting and running, or `length` calls, of at most `limit`.

    A request with a `timeout_s` is also refused if it would wait for longer: then `wait_s` and `retry_after_s` are set.

    Attributes:
        queue: the queue's name.
        length: requests or calls in it.
        limit: the most that the queue may hold.
        wait_s: how long the request would have waited, estimated from the work ahead of it and the workers' speed.
        retry_after_s: after how long it would be accepted, if nothing more came.
    """

    def __init__(
        self,
        queue: str,
        length: int,
        limit: int,
        what: str = "requests",
        *,
        wait_s: float | None = None,
        timeout_s: float = 0.0,
    ) -> None:
        if wait_s is None:
            reason = f"it holds {length} {what}, the limit is {limit}"
        else:
            reason = f"a request would wait for about {wait_s:.3g} s now, its timeout_s is {timeout_s:g}"
        super().__init__(f"queue {queue!r} is full: {reason}")
        self.queue = queue
        self.length = length
        self.limit = limit
        self.wait_s = wait_s
        self.retry_after_s = None if wait_s is None else wait_s - timeout_s


class TelemetryUnavailable(PenstockError):
    """OpenTelemetry traces or metrics are unavailable. The message names the missing package or the wrong variable."""


class NotDurable(PenstockError):
    """Enqueued with `durable=True`, but not known to be on the server's disk. Sending the same id again is safe."""

    def __init__(self, request_id: str, reason: str) -> None:
        super().__init__(f"request {request_id} is enqueued, but Redis did not confirm that it is on disk: {reason}")
        self.request_id = request_id


class RequestRefused(PenstockError):
    """Refused before anything was generated, by this client or by the worker. docs/wire.md lists the codes."""

    def __init__(self, request_id: str | None, code: str, message: str) -> None:
        super().__init__(f"request {request_id or '(not sent)'} refused, {code}: {message}")
        self.request_id = request_id
        self.code = code
        self.message = message


class RequestFailed(PenstockError):
    """Generation ended in an error. `reply` holds the text and tokens that came before it."""

    def __init__(self, request_id: str, code: str, message: str, reply: Reply) -> None:
        super().__init__(f"request {request_id} failed, {code}: {message}")
        self.request_id = request_id
        self.code = code
        self.message = message
        self.reply = reply


class CallFailed(PenstockError):
    """The worker that took a call failed on it; its log says why."""

    def __init__(self, call: str, code: str, message: str) -> None:
        super().__init__(f"{call} failed, {code}: {message}")
        self.call = call
        self.code = code
        self.message = message


class CallTimedOut(PenstockError, TimeoutError):
    """Nobody answered, and nobody will: a call is dropped once its time is over."""

    def __init__(self, call: str, queue: str, timeout_s: float, *, is_served: bool) -> None:
        why = "" if is_served else f"; no worker serves queue {queue!r}"
        super().__init__(f"no answer to {call} within {timeout_s:g} s{why}")
        self.call = call
        self.queue = queue
        self.timeout_s = timeout_s
        self.is_served = is_served


class ReplyTimeout(PenstockError, TimeoutError):
    """The caller's own wait ran out. A request from `submit` keeps running and can be waited for again."""

    def __init__(self, request_id: str, timeout_s: float) -> None:
        super().__init__(f"no end of the reply to {request_id} within {timeout_s:g} s")
        self.request_id = request_id
        self.timeout_s = timeout_s


class UnknownRequest(PenstockError, LookupError):
    """The queue does not know the id: it was never sent, or is forgotten.

    A request is known by the mark that the client library's enqueue leaves for `dedupe_window_s`, or by its entry if
    its id is the entry's own, or once a worker has taken it. A request enqueued by hand under another id is known only
    from that claim on.
    """

    def __init__(self, queue: str, request_id: str) -> None:
        super().__init__(f"queue {queue!r} knows no request {request_id!r}: it was never sent, or is forgotten")
        self.queue = queue
        self.request_id = request_id


class ReplyGone(PenstockError):
    """The reply can't be read, or no longer: it expired, or the given cursor never was one of its entries."""

    def __init__(self, request_id: str, reason: str) -> None:
        super().__init__(f"the reply to {request_id} is gone: {reason}")
        self.request_id = request_id


class ReplyCorrupt(PenstockError):
    """The reply can't be trusted: an entry does not follow the schema, or tokens are missing."""

    def __init__(self, request_id: str, reason: str) -> None:
        super().__init__(f"the reply to {request_id} is damaged: {reason}")
        self.request_id = request_id
