"""A row of the tables of keys declares a kind of key: name, type, owner, expiry, and what each role may do with it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
        together: grants of one name make one selector of an ACL, whose keys may stand together in one command. Without
            a name, grants of the same access and commands do.
        is_root: part of the role's own permissions, which are no selector.
    """

    roles: tuple[Role, ...]
    access: Access
    commands: str
    together: str = ""
    is_root: bool = False


@dataclass(frozen=True, slots=True)
class Area:
    """Keys that begin alike: an ACL names them by these patterns.

    Attributes:
        patterns: key patterns of an ACL.
        grants: what roles may do with all keys of the area.
    """

    patterns: tuple[str, ...]
    grants: tuple[Grant, ...] = ()


@dataclass(frozen=True, slots=True)
class KeyKind:
    """A kind of key.

    Attributes:
        make: names a key.
        type: what Redis stores there.
        owner: who creates such a key; others may change it.
        expiry: when Redis deletes it by itself; empty: it does not.
        grants: what roles may do with keys of this kind.
        area: the area that has them.
        wide: needs of a role with keys of this kind that are granted on the whole area.
    """

    make: Callable[..., str]
    type: Type
    owner: Owner
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
        """What a key is named by."""
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
        """Yields keys whose parameters have these values. Those of letters come for each stream of letters."""
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
