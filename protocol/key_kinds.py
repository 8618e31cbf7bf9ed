"""Describes a kind of key, a row of the key tables: name, type, owner, size, expiry, and what each role may do."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias

from penstock.protocol import keys

Type: TypeAlias = Literal["string", "hash", "set", "zset", "stream"]
Role: TypeAlias = Literal["producer", "gateway", "reader", "worker", "autoscaler", "operator"]
Owner: TypeAlias = Literal["client", "worker", "operator", "gateway"]
Slot: TypeAlias = Literal["queue", "id", "none"]
Access: TypeAlias = Literal["R", "W", "RW"]

_TAG = re.compile(r"\{([^{}]+)\}")


@dataclass(frozen=True, slots=True)
class Grant:
    """What roles may do with the keys that have this grant.

    Attributes:
        roles: those who may.
        access: `R`, `W` or `RW`, as in the key patterns of an ACL.
        commands: names as in an ACL, separated by spaces: `xlen xinfo|groups`.
        together: grants with the same name become one ACL selector, whose keys may appear together in one command.
            Grants without a name become one selector if their access and commands are the same.
        is_root: part of the role's own permissions, which are not a selector.
    """

    roles: tuple[Role, ...]
    access: Access
    commands: str
    together: str = ""
    is_root: bool = False


@dataclass(frozen=True, slots=True)
class Area:
    """Keys with a common beginning, which an ACL names by these patterns.

    Attributes:
        patterns: key patterns of an ACL.
        grants: what roles may do with all keys of the area.
    """

    patterns: tuple[str, ...]
    grants: tuple[Grant, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Memory in bytes that keys of one kind, their names included, take on the server for each item named below.

    What clients send comes on top. The figures are `MEMORY USAGE` of Valkey 9.1, for collections of thousands; small
    ones take half as much for each member, and other servers up to twice as much.

    Attributes:
        fleet: one for all queues and gateways.
        queue: a queue that is served.
        worker: a worker of a queue.
        client: a client that reads replies and counts tokens.
        tenant: a tenant whose requests wait.
        request: a request until its end, besides its prompt; with an id, a tenant and a deadline.
        held: a request that waits for one worker, or for those of one kind.
        running: a request that a worker runs.
        reply: a reply from its start until it expires.
        token: a token of such a reply, where chunks have one or two.
        remembered: an id that a client sent within its `dedupe_window_s`.
        cancelled: a request that was cancelled within a day.
        letter: a dead letter, besides the request in it.
        malformed: an entry that was not a request, besides its fields.
        api_key: an API key that was used within a minute.
        revoked: a revoked API key.
        answering: a request that a gateway is answering.
        charged: a request that an API key with limits was charged for, within the hour.
        document: a stored response, a file or a batch, besides its bytes.
        file: a file or a batch, besides what it takes as a document.
        batch: a batch, besides what it takes as a file.
        line: the result of a line of a batch, besides its bytes.
        repeatable: a request with an Idempotency-Key, as long as its reply.
    """

    fleet: int = 0
    queue: int = 0
    worker: int = 0
    client: int = 0
    tenant: int = 0
    request: int = 0
    held: int = 0
    running: int = 0
    reply: int = 0
    token: int = 0
    remembered: int = 0
    cancelled: int = 0
    letter: int = 0
    malformed: int = 0
    api_key: int = 0
    revoked: int = 0
    answering: int = 0
    charged: int = 0
    document: int = 0
    file: int = 0
    batch: int = 0
    line: int = 0
    repeatable: int = 0

    def times(self, **counts: int) -> int:
        """Returns the total bytes, given how many there are of each."""
        return sum(getattr(self, name) * count for name, count in counts.items())


@dataclass(frozen=True, slots=True)
class KeyKind:
    """A kind of key.

    Attributes:
        make: names a key.
        type: what Redis stores there.
        owner: who creates such a key; others may change it.
        size: the memory that keys of this kind take.
        expiry: when Redis deletes it by itself; empty: it does not.
        grants: what roles may do with keys of this kind.
        area: the area that has them.
        wide: needs of a role with keys of this kind that are granted on the whole area.
    """

    make: Callable[..., str]
    type: Type
    owner: Owner
    size: Size
    expiry: str = ""
    grants: tuple[Grant, ...] = ()
    area: Area | None = None
    wide: tuple[Grant, ...] = ()

    @property
    def name(self) -> str:
        """The name of the function that names such keys."""
        return self.make.__name__

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of the values that a key's name is made of."""
        return tuple(inspect.signature(self.make).parameters)

    @property
    def slot(self) -> Slot:
        """The keys that share its slot of a cluster: those of its queue, those of an id, or none."""
        (key, *_) = self.named(lambda parameter: f"<{parameter}>")
        tag = _TAG.search(key)
        if tag is None:
            return "none"
        return "queue" if tag[1] == "<queue>" else "id"

    @property
    def patterns(self) -> tuple[str, ...]:
        """Key patterns of an ACL that match the keys of this kind."""
        return tuple(self.named(lambda _: "*"))

    def key(self, **of: Any) -> str:
        """Returns a key of this kind. `of`: values by parameter; more may be given than it takes."""
        return self.make(**{parameter: of[parameter] for parameter in self.parameters})

    def named(self, value_of: Callable[[str], str]) -> Iterator[str]:
        """Yields the keys whose parameters have these values; a kind about letters has one for each letter stream."""
        if "letters" in self.parameters:
            for letters in (keys.dead(value_of("queue")), keys.malformed(value_of("queue"))):
                yield self.make(letters)
        else:
            yield self.make(*map(value_of, self.parameters))

    def needs(self, role: Role) -> Iterator[Grant]:
        """Yields what a role does with keys of this kind."""
        for grant in (*self.grants, *self.wide, *(() if self.area is None else self.area.grants)):
            if role in grant.roles:
                yield grant


def total_size(kinds: Iterable[KeyKind]) -> Size:
    """Returns the sum of the sizes of these kinds."""
    sizes = [kind.size for kind in kinds]
    return Size(**{each.name: sum(getattr(size, each.name) for size in sizes) for each in fields(Size)})
