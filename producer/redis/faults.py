"""What an error from Redis means: the one place that looks at an error's code, or at its text.

A server's error has a code, its first word. On the way here it may have been wrapped: the Redis library takes the codes
it knows off the text, and writes the command before it in a pipeline; a transaction and a cluster client have words of
their own; ours are raised from it. Where the code is the bare ERR, there is only the text to go by.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum, auto
from typing import Literal, TypeAlias

from hiredis import ReplyError
from redis import exceptions

from penstock.producer.errors import ConnectionLost, ServerRefused


class JunkFound(exceptions.ResponseError):
    """A key holds what Penstock never wrote there, and it stays so until somebody looks after it."""

    def __init__(self, key: str) -> None:
        super().__init__(f"JUNK {key} holds what Penstock never wrote there")
        self.key = key


class Dropped(exceptions.ConnectionError):
    """The connection was cut here with all others, for what the server said over one of them: the cause (`moves`).

    It is no outage by itself: the next try tells how the server is.
    """


class Meaning(Enum):
    """What to make of an error, those that end last first: of several errors together the last one counts."""

    AWAY = auto()  # no connection, no answer, or not the node of a cluster that has the key
    LOADING = auto()  # it reads its data from disk, or what a new primary has
    ELSEWHERE = auto()  # it takes no writes: it was demoted, or is cut off from its replicas
    LATER = auto()  # it refuses for a reason of its own that may pass: its memory, disk, clients, a script
    NO_GROUP = auto()  # the stream, or its group, is not there
    GROUP_EXISTS = auto()
    NO_SCRIPT = auto()  # it does not know the hash
    STALE_ID = auto()  # the stream has an entry with this id, or a later one
    WRONG_PASSWORD = auto()
    NO_PASSWORD = auto()
    NEEDLESS_PASSWORD = auto()
    NOT_PERMITTED = auto()  # by its user's rules, also from within a script, or by protected mode
    UNKNOWN_COMMAND = auto()  # an older server, or one that has it renamed
    JUNK = auto()  # a key holds what Penstock never writes there; or a script of ours broke, mostly over such a value
    OTHER = auto()  # what nobody expects of a server, or no error of Redis at all


UNREACHABLE = (
    exceptions.ConnectionError,
    exceptions.TimeoutError,
    exceptions.ClusterError,
    exceptions.RedisClusterException,
    OSError,
)
"""What the Redis library raises when the server is not there, is loading, or does not answer in time.

`AuthenticationError` is among them by descent, although trying again does not cure it.
"""

_PASSING = {Meaning.AWAY, Meaning.LOADING, Meaning.ELSEWHERE, Meaning.LATER, Meaning.NO_SCRIPT}
Trouble: TypeAlias = Literal["away", "passing", "refused", "other"]
"""In one word, as metrics have it."""

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
    "JUNK": Meaning.JUNK,  # our own scripts' word
}
# How texts with the code ERR begin, and those of others whose code was lost on the way.
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
# Where neither code nor text says it. The first that fits.
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
# A pipeline's words go before the error's, with the command, which is the caller's and may hold anything, in between.
_WRAPPED = re.compile(
    r"(?:Command # \d+ \(.*\) of pipeline caused error: [('\"]*"
    r"|Redis Cluster cannot be connected\. .*? reachable node: "
    r"|(?:EXECABORT )?Transaction discarded because of: )(.*)",
    re.DOTALL,
)


def meaning_of(error: BaseException) -> Meaning:
    """What an error means, whatever it is wrapped in."""
    return _judge(error)[1]


def word_of(error: BaseException) -> str:
    """The code, or else what stands for it: errors with one word are one trouble."""
    return _judge(error)[0]


def may_pass(error: BaseException) -> bool:
    """Whether the same command may succeed later, with nobody changing what this user may do."""
    return meaning_of(error) in _PASSING


def is_refused(error: BaseException) -> bool:
    """Whether the server will go on refusing until somebody changes it, or the user's password or permissions."""
    return meaning_of(error) in _REFUSED


def trouble_of(error: BaseException) -> Trouble:
    """What kind of trouble an error means for whoever depends on Redis."""
    if is_away(error):
        return "away"
    return "passing" if may_pass(error) else "refused" if is_refused(error) else "other"


def may_be_elsewhere(error: BaseException) -> bool:
    """Whether the server takes no writes, or has yet to load its data, while the name may lead to one that does."""
    return meaning_of(error) in (Meaning.LOADING, Meaning.ELSEWHERE)


def is_away(error: BaseException) -> bool:
    """Whether there is no server, or no answer."""
    return meaning_of(error) is Meaning.AWAY


def is_not_permitted(error: BaseException) -> bool:
    """Whether the user got in, and may not do this."""
    return meaning_of(error) is Meaning.NOT_PERMITTED


def is_no_group(error: BaseException) -> bool:
    """Whether the stream or its group is not there, as after FLUSHALL."""
    return meaning_of(error) is Meaning.NO_GROUP


def is_junk(error: BaseException) -> bool:
    """Whether it is about what a key holds: the same fails until that is set aside (`penstock.producer.redis.junk`)."""
    return meaning_of(error) is Meaning.JUNK


def is_stale_id(error: BaseException) -> bool:
    """Whether XADD was refused because the stream has an entry with this id, or a later one."""
    return meaning_of(error) is Meaning.STALE_ID


def code_of(error: BaseException) -> str:
    """The server's own word for an error, such as MISCONF, whatever it is wrapped in; empty: it has none."""
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
        cause = error.__context__  # what CLUSTER SLOTS was refused with is told as if there were no cluster
    if cause is not None:
        judged = _judge(cause)
        if judged[1] is not Meaning.OTHER or isinstance(cause, exceptions.ResponseError):
            return judged
    meaning = _by_type(error)
    return meaning.name.lower(), meaning


def _said_by(error: BaseException) -> _Judgement | None:
    """By the code, or else by the text. None: neither says anything, as in what an error is raised from."""
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
    """The text, and what it was before it was wrapped."""
    yield text
    while (wrapped := _WRAPPED.match(text)) is not None:
        text = wrapped[1]
        yield text


def _by_type(error: BaseException) -> Meaning:
    if isinstance(error, ServerRefused):
        if error.is_junk:
            return Meaning.JUNK
        return Meaning.LATER if error.is_passing else Meaning.OTHER
    return next((meaning for kind, meaning in _TYPES.items() if isinstance(error, kind)), Meaning.OTHER)
