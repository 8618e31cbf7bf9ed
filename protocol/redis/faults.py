"""Classifies errors from Redis: the only module that looks at an error's code or text.

A server's error has a code, its first word. It may have been wrapped on the way here. The Redis library strips the
codes that it knows, and in a pipeline prefixes the command. A transaction and a cluster client use their own words, and
our errors are raised from it. If the code is just ERR, only the text is left to go by.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum, auto
from typing import Literal, TypeAlias

from hiredis import ReplyError
from redis import exceptions

from penstock.protocol.errors import ConnectionLost, ServerRefused


class JunkFound(exceptions.ResponseError):
    """A key holds what Penstock never wrote there, until somebody fixes it."""

    def __init__(self, key: str) -> None:
        super().__init__(f"JUNK {key} holds what Penstock never wrote there")
        self.key = key


class Dropped(exceptions.ConnectionError):
    """The connection was cut by this process, with all others to its server, because of an answer over one of them.

    That answer is the cause of this error (see `moves`).

    It is not an outage by itself: the next attempt shows the server's state.
    """


class Meaning(Enum):
    """Meaning of an error. Of several errors together, the one defined last here counts."""

    AWAY = auto()  # no connection, no answer, or not the node of a cluster that has the key
    LOADING = auto()  # it reads its data from disk, or from a new primary
    ELSEWHERE = auto()  # it takes no writes: it was demoted, or is cut off from its replicas
    LATER = auto()  # it refuses for a reason that may pass: memory, disk, clients, a script
    NO_GROUP = auto()  # the stream or its group does not exist
    GROUP_EXISTS = auto()
    NO_SCRIPT = auto()  # it does not know the hash
    STALE_ID = auto()  # the stream has an entry with this id, or a later one
    WRONG_PASSWORD = auto()
    NO_PASSWORD = auto()
    NEEDLESS_PASSWORD = auto()
    NOT_PERMITTED = auto()  # by its user's rules, also within a script, or by protected mode
    UNKNOWN_COMMAND = auto()  # an older server, or one that renamed it
    JUNK = auto()  # a key holds what Penstock never writes there; or our script failed, mostly over such a value
    OTHER = auto()  # nothing expected of a server, or not a Redis error at all


UNREACHABLE = (
    exceptions.ConnectionError,
    exceptions.TimeoutError,
    exceptions.ClusterError,
    exceptions.RedisClusterException,
    OSError,
)
"""Exceptions of the Redis library for a server that is away, is loading, or does not answer in time.

`AuthenticationError` is among them by descent, although trying again does not cure it.
"""

_PASSING = {Meaning.AWAY, Meaning.LOADING, Meaning.ELSEWHERE, Meaning.LATER, Meaning.NO_SCRIPT}
Trouble: TypeAlias = Literal["away", "passing", "refused", "other"]
"""The trouble in one word, as metrics have it."""

_REFUSED = {
    Meaning.WRONG_PASSWORD, Meaning.NO_PASSWORD, Meaning.NEEDLESS_PASSWORD, Meaning.NOT_PERMITTED,
    Meaning.UNKNOWN_COMMAND,
}  # fmt: skip

_LATER = (
    "OOM", "MISCONF", "BUSY", "CLUSTERDOWN", "TRYAGAIN", "FAILOVER", "NOTBUSY", "INPROG", "NOGOODSLAVE",
    "NOGOODREPLICA", "NOMASTERLINK", "NOQUORUM", "IOERR",
)  # fmt: skip
_CODES = {
    **dict.fromkeys(_LATER, Meaning.LATER),
    **dict.fromkeys(("READONLY", "UNBLOCKED", "MASTERDOWN", "NOREPLICAS"), Meaning.ELSEWHERE),
    **dict.fromkeys(("MOVED", "ASK", "REDIRECT"), Meaning.AWAY),
    "LOADING": Meaning.LOADING,
    "NOGROUP": Meaning.NO_GROUP,
    "BUSYGROUP": Meaning.GROUP_EXISTS,
    "NOSCRIPT": Meaning.NO_SCRIPT,
    "WRONGPASS": Meaning.WRONG_PASSWORD,
    "NOAUTH": Meaning.NO_PASSWORD,
    "NOPERM": Meaning.NOT_PERMITTED,
    "DENIED": Meaning.NOT_PERMITTED,
    "WRONGTYPE": Meaning.JUNK,
    "JUNK": Meaning.JUNK,  # our own scripts' code
}
# Beginnings of texts with the code ERR, and of others whose code was lost on the way.
_TEXTS = {
    "max number of clients": Meaning.LATER,
    "WAIT cannot be used with replica instances": Meaning.ELSEWHERE,
    "WAITAOF cannot be used with replica instances": Meaning.ELSEWHERE,
    "Script attempted to access a non local key": Meaning.LATER,  # as slots move
    "Script attempted to access a slot not served": Meaning.LATER,
    "Script attempted to execute a": Meaning.LATER,  # "... command while the cluster is down"
    "no such key": Meaning.NO_GROUP,
    "The ID specified in XADD": Meaning.STALE_ID,
    "Operation against a key holding the wrong kind of value": Meaning.JUNK,
    "hash value is not": Meaning.JUNK,
    "value is not an integer": Meaning.JUNK,
    "increment or decrement would overflow": Meaning.JUNK,
    "resulting score is not a number": Meaning.JUNK,
    "The stream has exhausted the last possible ID": Meaning.JUNK,
    "user_script:": Meaning.JUNK,
    "Unrecognized XCLAIM option": Meaning.JUNK,  # for an entry's id, which was read from a key
    "Invalid stream ID": Meaning.JUNK,
    "value is not a valid float": Meaning.JUNK,
    "ACL failure in script": Meaning.NOT_PERMITTED,
    "The user executing the script can't": Meaning.NOT_PERMITTED,
    "invalid password": Meaning.WRONG_PASSWORD,
    "invalid username-password": Meaning.WRONG_PASSWORD,
    "Invalid Username or Password": Meaning.WRONG_PASSWORD,
    "wrong number of arguments for 'auth'": Meaning.WRONG_PASSWORD,
    "wrong number of arguments for 'AUTH'": Meaning.WRONG_PASSWORD,
    "Authentication required": Meaning.NO_PASSWORD,
    "AUTH <password> called without any password": Meaning.NEEDLESS_PASSWORD,
    "Client sent AUTH, but no password is set": Meaning.NEEDLESS_PASSWORD,
    "unknown command": Meaning.UNKNOWN_COMMAND,
    "unknown subcommand": Meaning.UNKNOWN_COMMAND,
    "Unknown subcommand": Meaning.UNKNOWN_COMMAND,
    "Unknown command called from script": Meaning.UNKNOWN_COMMAND,
    "Unknown Redis command called from script": Meaning.UNKNOWN_COMMAND,
    "Unknown Valkey command called from script": Meaning.UNKNOWN_COMMAND,
}
# For errors that neither code nor text classifies. The first match counts.
_TYPES: dict[type[BaseException], Meaning] = {
    exceptions.BusyLoadingError: Meaning.LOADING,
    exceptions.AuthenticationError: Meaning.WRONG_PASSWORD,
    exceptions.AuthenticationWrongNumberOfArgsError: Meaning.WRONG_PASSWORD,
    exceptions.AuthorizationError: Meaning.NOT_PERMITTED,
    exceptions.NoPermissionError: Meaning.NOT_PERMITTED,
    exceptions.OutOfMemoryError: Meaning.LATER,
    exceptions.ReadOnlyError: Meaning.ELSEWHERE,
    exceptions.MasterDownError: Meaning.ELSEWHERE,
    exceptions.TryAgainError: Meaning.LATER,
    exceptions.AskError: Meaning.AWAY,
    exceptions.ClusterDownError: Meaning.LATER,
    exceptions.NoScriptError: Meaning.NO_SCRIPT,
    **dict.fromkeys((*UNREACHABLE, ConnectionLost), Meaning.AWAY),
}  # fmt: skip

_CODE = re.compile(r"-?([A-Z]{3,})(?:\s|$)")
# A pipeline puts its words before the error's, with the command in between. A command may hold any text.
_WRAPPED = re.compile(
    r"(?:Command # \d+ \(.*\) of pipeline caused error: [('\"]*"
    r"|Redis Cluster cannot be connected\. .*? reachable node: "
    r"|(?:EXECABORT )?Transaction discarded because of: )(.*)",
    re.DOTALL,
)


def meaning_of(error: BaseException) -> Meaning:
    """Returns the meaning of an error, however it is wrapped."""
    return _judge(error)[1]


def word_of(error: BaseException) -> str:
    """Returns the code or a substitute for it: errors with the same word are the same trouble."""
    return _judge(error)[0]


def may_pass(error: BaseException) -> bool:
    """Whether the same command may succeed later without a change to this user's permissions."""
    return meaning_of(error) in _PASSING


def is_refused(error: BaseException) -> bool:
    """Whether the server will go on refusing until somebody changes it, or the user's password or permissions."""
    return meaning_of(error) in _REFUSED


def trouble_of(error: BaseException) -> Trouble:
    """Returns the kind of trouble that an error means for a process that depends on Redis."""
    if is_away(error):
        return "away"
    return "passing" if may_pass(error) else "refused" if is_refused(error) else "other"


def may_be_elsewhere(error: BaseException) -> bool:
    """Whether the server takes no writes, or is still loading, while its name may lead to one that takes them."""
    return meaning_of(error) in (Meaning.LOADING, Meaning.ELSEWHERE)


def is_away(error: BaseException) -> bool:
    """Whether there is no server or no answer."""
    return meaning_of(error) is Meaning.AWAY


def is_not_permitted(error: BaseException) -> bool:
    """Whether the user was authenticated but lacks the permission."""
    return meaning_of(error) is Meaning.NOT_PERMITTED


def is_no_group(error: BaseException) -> bool:
    """Whether the stream or its group is missing, as after FLUSHALL."""
    return meaning_of(error) is Meaning.NO_GROUP


def is_junk(error: BaseException) -> bool:
    """Whether the error is about a key's content: the command fails until that is set aside
    (`penstock.protocol.queue.junk`).
    """
    return meaning_of(error) is Meaning.JUNK


def is_stale_id(error: BaseException) -> bool:
    """Whether XADD was refused because the stream has an entry with this id, or a later one."""
    return meaning_of(error) is Meaning.STALE_ID


def code_of(error: BaseException) -> str:
    """Returns the server's own word for an error, such as MISCONF, however it is wrapped; empty if it has none."""
    word = word_of(error)
    return word if word in _CODES else ""


_Judgement: TypeAlias = tuple[str, Meaning]


def _judge(error: BaseException) -> _Judgement:
    if isinstance(error, BaseExceptionGroup):
        return max(map(_judge, error.exceptions), key=lambda judged: judged[1].value)
    said = _said_by(error)
    if said is not None:
        return said
    cause = error.__cause__
    if cause is None and isinstance(error, exceptions.RedisClusterException) and not error.__suppress_context__:
        cause = error.__context__  # if CLUSTER SLOTS is refused, the library reports that there is no cluster
    if cause is not None:
        judged = _judge(cause)
        if judged[1] is not Meaning.OTHER or isinstance(cause, exceptions.ResponseError):
            return judged
    meaning = _meaning_by_type(error)
    return meaning.name.lower(), meaning


def _said_by(error: BaseException) -> _Judgement | None:
    """Classifies by the code, or else by the text. None: neither helps, so the error's cause is checked."""
    if not isinstance(error, (exceptions.RedisError, exceptions.RedisClusterException, ReplyError)):
        return None
    code: str | None = getattr(error, "status_code", None)
    if code not in (None, "ERR", "EXECABORT"):
        return code, _CODES.get(code, Meaning.OTHER)
    for text in _unwrapped(str(error)):
        found = None if code == "ERR" else _CODE.match(text)
        if found is not None and found[1] in _CODES:
            return found[1], _CODES[found[1]]
        for beginning, meaning in _TEXTS.items():
            if text.removeprefix("ERR ").startswith(beginning):
                return beginning, meaning
    return None


def _unwrapped(text: str) -> Iterator[str]:
    """Yields the text, and the text before each wrapping."""
    yield text
    while (wrapped := _WRAPPED.match(text)) is not None:
        text = wrapped[1]
        yield text


def _meaning_by_type(error: BaseException) -> Meaning:
    if isinstance(error, ServerRefused):
        if error.is_junk:
            return Meaning.JUNK
        return Meaning.LATER if error.is_passing else Meaning.OTHER
    return next((meaning for kind, meaning in _TYPES.items() if isinstance(error, kind)), Meaning.OTHER)
