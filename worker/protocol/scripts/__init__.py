"""The multi-key steps of the delivery protocol: Lua scripts in `../lua`, each on keys of one hash slot.

Every function here returns one command, ready for `execute_command` or a pipeline, that holds the whole script (EVAL),
so that no server must be prepared. `producer.redis.pipeline.execute` sends its hash to servers that know it. Chunks
need no script at all.

`claims` has the steps on a request's state and reply, `entries` those on the queue's entries, `lanes` those on what
waits, `presence` those on a
worker's heartbeat, `calls` those on the stream of calls.
"""

from penstock.worker.protocol.scripts.calls import answer_call, take_calls
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
    adopt,
    bury,
    disown,
    pending,
    retire,
    set_aside,
)
from penstock.worker.protocol.scripts.lanes import Bill, Part, ack, charge, measure, say, sweep, take
from penstock.worker.protocol.scripts.presence import (
    Beaten,
    OtherModel,
    Rival,
    announce,
    beat,
    leave,
    parse_beat,
    parse_reserve,
    release,
    reserve,
)

__all__ = [
    "MAX_EPOCH",
    "Beaten",
    "Bill",
    "Claim",
    "FlatFields",
    "LetterLimits",
    "NotClaimed",
    "OtherModel",
    "Part",
    "Rival",
    "Standing",
    "absolve",
    "ack",
    "adopt",
    "announce",
    "answer_call",
    "beat",
    "bury",
    "charge",
    "claim",
    "disown",
    "end_unclaimed",
    "find",
    "finish",
    "leave",
    "measure",
    "newest",
    "parse_beat",
    "parse_claim",
    "parse_reserve",
    "parse_standing",
    "pending",
    "release",
    "reserve",
    "retire",
    "return_request",
    "say",
    "set_aside",
    "sweep",
    "take",
    "take_calls",
]
