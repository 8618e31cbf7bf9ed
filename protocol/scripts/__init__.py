"""The multi-key steps of the delivery protocol: Lua scripts, each on keys of one hash slot.

The scripts of a module here are in the folder `lua/` of the same name; `lua/shared/` has what several of them use.

Every function here returns one command, ready for `execute_command` or a pipeline, that holds the whole script (EVAL),
so that no server needs preparation. `protocol.redis.pipeline.execute` sends its hash to servers that know it. Chunks
need no script at all.

`claims` has the steps on a request's state and reply, `entries` those on a worker's pending entries, `lanes` those on
waiting entries, `presence` those on a worker's heartbeat, `calls` those on the stream of calls.
"""

from penstock.protocol.scripts.calls import answer_call, redate_calls, take_calls
from penstock.protocol.scripts.claims import (
    MAX_EPOCH,
    Claim,
    ClaimState,
    EarlierClaim,
    FlatFields,
    NotClaimed,
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
from penstock.protocol.scripts.entries import (
    LetterLimits,
    bury,
    pending,
)
from penstock.protocol.scripts.lanes import (
    Bill,
    WorkerCapacity,
    ack,
    charge,
    measure,
    pass_on,
    put_back,
    relane,
    retire,
    say,
    set_aside,
    sweep,
    take,
)
from penstock.protocol.scripts.presence import (
    Beaten,
    OtherModel,
    Rival,
    announce,
    beat,
    lapsed,
    leave,
    look,
    new_instance,
    parse_beat,
    parse_reserve,
    release,
    report,
    reserve,
    unreport,
)

__all__ = [
    "MAX_EPOCH",
    "Beaten",
    "Bill",
    "Claim",
    "ClaimState",
    "EarlierClaim",
    "FlatFields",
    "LetterLimits",
    "NotClaimed",
    "OtherModel",
    "Rival",
    "WorkerCapacity",
    "absolve",
    "ack",
    "announce",
    "answer_call",
    "beat",
    "bury",
    "charge",
    "claim",
    "end_unclaimed",
    "find",
    "finish",
    "lapsed",
    "leave",
    "look",
    "measure",
    "new_instance",
    "newest",
    "parse_beat",
    "parse_claim",
    "parse_reserve",
    "parse_standing",
    "pass_on",
    "pending",
    "put_back",
    "redate_calls",
    "relane",
    "release",
    "report",
    "reserve",
    "retire",
    "return_request",
    "say",
    "set_aside",
    "sweep",
    "take",
    "take_calls",
    "unreport",
]
