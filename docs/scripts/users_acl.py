"""Writes deploy/redis/users.acl: a Redis user per role, with what the tables of keys grant it.

    python -m docs.scripts.users_acl > deploy/redis/users.acl

The file has no passwords, so at first nobody gets in; docs/security.md says how to use it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

from penstock.gateway.store import key_table as gateways
from penstock.protocol import key_table as queues
from penstock.protocol.key_kinds import Access, Grant, Role

KINDS = (*queues.TABLE, *gateways.TABLE)
AREAS = (*queues.AREAS, *gateways.AREAS)


@dataclass(slots=True)
class Selector:
    """Commands, and the keys that may stand together in one of them."""

    access: Access
    is_root: bool
    patterns: list[str] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)

    def add(self, patterns: tuple[str, ...], commands: str) -> None:
        """Adds what is not in it yet."""
        self.patterns += [each for each in patterns if each not in self.patterns]
        self.commands += [each for each in commands.split() if each not in self.commands]

    def rules(self) -> str:
        """Returns the rules, without what stands around a selector."""
        keys = (f"%{self.access}~{pattern}" for pattern in self.patterns)
        between = () if self.is_root else ("-@all",)
        return " ".join((*keys, *between, *(f"+{command}" for command in self.commands)))


def selectors(role: Role) -> list[Selector]:
    """Returns what the tables grant to a role, in their order."""
    found: dict[tuple[Access, str, bool], Selector] = {}
    for patterns, grant in _granted():
        if role in grant.roles:
            group = (grant.access, grant.together or grant.commands, grant.is_root)
            found.setdefault(group, Selector(grant.access, grant.is_root)).add(patterns, grant.commands)
    return list(found.values())


def _granted() -> Iterator[tuple[tuple[str, ...], Grant]]:
    for kind in KINDS:
        yield from ((kind.patterns, grant) for grant in kind.grants)
        if kind.area is not None:
            yield from ((kind.area.patterns, grant) for grant in kind.wide)
    for area in AREAS:
        yield from ((area.patterns, grant) for grant in area.grants)


def user(role: Role) -> str:
    """Returns a role's line."""
    own = selectors(role)
    commands = (f"+{command}" for command in queues.KEYLESS[role].split())
    roots = (selector.rules() for selector in own if selector.is_root)
    others = (f"({selector.rules()})" for selector in own if not selector.is_root)
    return " ".join((f"user {role} on resetkeys resetchannels -@all", *commands, *roots, *others))


def users_acl() -> str:
    """Returns the whole file."""
    lines = ("user default off", "user admin on ~* &* +@all", *map(user, queues.KEYLESS))
    return "".join(f"{line}\n" for line in lines)


if __name__ == "__main__":
    sys.stdout.write(users_acl())
