"""The multi-key steps of the delivery protocol: Lua scripts in `../lua`, each on keys of one hash slot.

Every function here returns one command, ready for `execute_command` or a pipeline, that holds the whole script (EVAL),
so that no server must be prepared. `producer.redis.pipeline.execute` sends its hash to servers that know it. Chunks
need no script at all.

`claims` has the steps on a request's state and reply, `entries` those on the queue's entries, `presence` those on a
worker's heartbeat.
"""

from penstock.worker.protocol.scripts.claims import (
    MAX_EPOCH,
    Claim,
    FlatFields,
    NotClaimed,
    Standing,
    absolve,
    claim,
    end_unclaimed,
    find,
    finish,
    newest,
    parse_claim,
    parse_standing,
    return_request,
)
from penstock.worker.protocol.scripts.entries import (
    LetterLimits,
    ack,
    adopt,
    bury,
    disown,
    pending,
    retire,
    take,
)
from penstock.worker.protocol.scripts.presence import Rival, beat, leave, parse_beat, release, reserve

__all__ = [
    "MAX_EPOCH",
    "Claim",
    "FlatFields",
    "LetterLimits",
    "NotClaimed",
    "Rival",
    "Standing",
    "absolve",
    "ack",
    "adopt",
    "beat",
    "bury",
    "claim",
    "disown",
    "end_unclaimed",
    "find",
    "finish",
    "leave",
    "newest",
    "parse_beat",
    "parse_claim",
    "parse_standing",
    "pending",
    "release",
    "reserve",
    "retire",
    "return_request",
    "take",
]
