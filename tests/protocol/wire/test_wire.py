"""The schema: what is written is read back; hostile entries are refused with an id to answer to."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from penstock.protocol.wire import (
    ID_PATTERN,
    ChunkEntry,
    EndEntry,
    GenerateRequest,
    OwnEntry,
    ReplyEntry,
    TokenLogprob,
    ToolCallDelta,
    TopLogprob,
    WireError,
    decode_reply,
    encode_reply,
    explain,
    parse_request,
)
from penstock.protocol.wire.requests import _RESERVED_VARIABLES, AFFINE_CHARS

ENTRY_ID = "1700000000000-0"
BODY_LIMIT = 100_000

text = st.text(st.characters(codec="utf-8"), max_size=40)
ids = st.from_regex(ID_PATTERN, fullmatch=True)
token_ids = st.lists(st.integers(0, 200_000), max_size=6).map(tuple)
counts = st.integers(0, 10**9)


def optional(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
traces = st.just(TRACE) | st.from_regex(
    r"[1-9a-e][0-9a-f]-[1-9a-f]{32}-[1-9a-f]{16}-[0-9a-f]{2}(-[!-~]{0,20})?", fullmatch=True
)

sampling = st.fixed_dictionaries(
    {},
    optional={
        "id": ids,
        "n": st.integers(1, 64),
        "max_tokens": st.integers(10, 10**6),
        "min_tokens": st.integers(0, 10),
        "temperature": st.floats(0, 100),
        "top_p": st.floats(0, 1, exclude_min=True),
        "top_k": counts,
        "min_p": st.floats(0, 1),
        "seed": st.integers(0, 2**63 - 1),
        "repetition_penalty": st.floats(0, 100, exclude_min=True),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "logit_bias": st.dictionaries(st.integers(0, 1000), st.floats(-100, 100), max_size=3),
        "allowed_token_ids": token_ids,
        "bad_token_ids": token_ids,
        "stop": st.lists(text.filter(bool), max_size=3).map(tuple),
        "stop_token_ids": token_ids,
        "ignore_eos": st.booleans(),
        "logprobs": st.integers(0, 20),
        "prompt_logprobs": st.integers(0, 20),
        "echo": st.booleans(),
        "include_stop_str_in_output": st.booleans(),
        "skip_special_tokens": st.booleans(),
        "regex": text.filter(bool),
        "priority": st.integers(-1000, 1000),
        "timeout_s": st.floats(0.001, 604_800),
        "keep_s": st.floats(60, 31_622_400),
        "tenant": ids,
        "traceparent": traces,
    },
)
roles = st.sampled_from(["system", "developer", "user", "tool"])
parts = st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": text}), min_size=1, max_size=2)
objects = st.dictionaries(
    text, st.none() | st.integers() | st.floats(-1, 1) | text | st.lists(text, max_size=2), max_size=3
)
names = st.from_regex(r"[A-Za-z0-9_.-]{1,9}", fullmatch=True)
calls = st.fixed_dictionaries(
    {"function": st.fixed_dictionaries({"name": names, "arguments": objects | objects.map(json.dumps)})},
    optional={"id": text, "type": st.just("function")},
)
messages = st.lists(
    st.fixed_dictionaries({"role": roles, "content": text | parts}, optional={"name": text.filter(bool)})
    | st.fixed_dictionaries(
        {"role": st.just("assistant"), "content": text},
        optional={"reasoning": text, "tool_calls": st.lists(calls, max_size=2)},
    ),
    min_size=1,
    max_size=3,
)
functions = st.fixed_dictionaries(
    {"name": names}, optional={"parameters": objects, "description": text, "strict": st.none() | st.booleans()}
)
tools = st.lists(
    st.fixed_dictionaries({"type": st.just("function"), "function": functions}),
    max_size=2,
    unique_by=lambda tool: cast("dict[str, Any]", tool["function"])["name"],
)
free_names = text.filter(lambda name: name not in _RESERVED_VARIABLES)
prompts = st.one_of(
    st.fixed_dictionaries({"prompt": text}),
    st.fixed_dictionaries(
        {"messages": messages},
        optional={
            "tools": tools,
            "tool_choice": st.sampled_from(["none", "auto"]),
            "parallel_tool_calls": st.booleans(),
            "reasoning_effort": st.sampled_from(["none", "low", "max"]),
            "add_generation_prompt": st.booleans(),
            "chat_template_kwargs": st.dictionaries(free_names, text | objects, max_size=2),
        },
    ),
    st.fixed_dictionaries({"prompt_token_ids": token_ids}),
)
requests = st.builds(lambda prompt, rest: GenerateRequest.model_validate({**prompt, **rest}), prompts, sampling)

one_logprob = {"id": counts, "token": text, "bytes": st.binary(max_size=4), "logprob": st.floats(-100, 0)}
logprobs = st.builds(
    TokenLogprob, **one_logprob, top=st.lists(st.builds(TopLogprob, **one_logprob), max_size=2).map(tuple)
)
deltas = st.builds(ToolCallDelta, index=counts, id=optional(text), name=optional(text), arguments=text)
stopped = {"stop_string": optional(text), "stop_token_id": optional(counts)}
reasons = st.sampled_from(["stop", "tool_calls", "length", "cancelled", "expired", "error"])
replies: st.SearchStrategy[ReplyEntry] = st.one_of(
    st.builds(OwnEntry, worker=text, epoch=counts),
    st.builds(
        ChunkEntry,
        index=counts,
        offset=counts,
        text=text,
        tokens=token_ids,
        reasoning=text,
        tool_calls=st.lists(deltas, max_size=2).map(tuple),
        logprobs=optional(st.lists(logprobs, max_size=2).map(tuple)),
        prompt_logprobs=optional(st.lists(optional(logprobs), max_size=2).map(tuple)),
        finish_reason=optional(reasons),
        **stopped,
    ),
    st.builds(
        EndEntry,
        finish_reason=reasons,
        finish_reasons=optional(st.lists(reasons, min_size=2, max_size=3).map(tuple)),
        prompt_tokens=counts,
        cached_tokens=counts,
        completion_tokens=counts,
        queued_ms=optional(counts),
        ttft_ms=optional(counts),
        total_ms=optional(counts),
        code=optional(text),
        message=optional(text),
        **stopped,
    ),
)


def parse(fields: dict[bytes, bytes]) -> GenerateRequest:
    return parse_request(ENTRY_ID, fields, max_body_bytes=BODY_LIMIT)


def encoded(fields: dict[str, str]) -> dict[bytes, bytes]:
    return {name.encode(): value.encode() for name, value in fields.items()}


def flat(request: GenerateRequest) -> dict[str, str]:
    """Returns the request as flat fields, as a person would write them."""
    fields = {}
    for name, value in request.model_dump(exclude_defaults=True, mode="json").items():
        fields[name] = value if isinstance(value, str) else json.dumps(value)
    return fields


def named(request: GenerateRequest) -> GenerateRequest:
    return request if request.id is not None else request.model_copy(update={"id": ENTRY_ID})


@given(requests)
@example(GenerateRequest(prompt="x" * AFFINE_CHARS))
@example(GenerateRequest(prompt="x" * AFFINE_CHARS, affinity="home"))
def test_a_request_comes_back_from_its_document(request: GenerateRequest) -> None:
    """A long request also gets an affinity, which says with which others it goes."""
    entry = request.to_entry()
    own = {} if request.affinity is not None else {"affinity": entry.get("affinity")}
    assert parse(encoded(entry)) == named(request).model_copy(update=own)


@given(requests)
def test_a_request_comes_back_from_flat_fields(request: GenerateRequest) -> None:
    assert parse(encoded(flat(request))) == named(request)


@given(replies)
def test_a_reply_entry_comes_back(entry: ReplyEntry) -> None:
    fields = encode_reply(entry)
    assert all(isinstance(value, str) for value in fields.values())
    assert decode_reply(fields) == entry


def test_a_reply_entry_is_readable() -> None:
    entry = ChunkEntry(index=0, offset=3, text="Hi there", tokens=(7, 8))
    assert encode_reply(entry) == {"type": "chunk", "index": "0", "offset": "3", "text": "Hi there", "tokens": "7,8"}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=8,
)
field_names = st.sampled_from([*GenerateRequest.model_fields, "request", "other"]).map(str.encode)
raw_values = st.binary(max_size=40) | json_values.map(lambda value: json.dumps(value).encode())
documents = st.dictionaries(st.sampled_from([*GenerateRequest.model_fields, "other"]), json_values, max_size=4)


@pytest.mark.parametrize("bias", ["1e39", "-1e39", "100.5", "-101", "Infinity", "-Infinity", "NaN"])
def test_a_bias_out_of_range_is_refused_by_name(bias: str) -> None:
    with pytest.raises(WireError, match=r"logit_bias\.7: Input should be (greater|less) than or equal to -?100, not"):
        parse({b"prompt": b"x", b"logit_bias": f'{{"3": 100, "7": {bias}}}'.encode()})


@given(
    st.dictionaries(field_names | st.binary(max_size=8), raw_values, max_size=5)
    | documents.map(lambda document: {b"request": json.dumps(document).encode()})
)
@example({b"request": b"[" * 50_000})
@example({b"request": b'{"id": 5, "prompt": "x"}'})
@example({b"request": b'{"prompt": "\\ud800"}'})
@example({b"request": b'{"seed": ' + b"9" * 5000 + b', "prompt": "x"}'})
@example({b"prompt": b"x", b"messages": b"[" * 50_000})
@example({b"prompt": b"x", b"id": b"a b"})
@example({b"prompt": b"x", b"temperature": b"nan"})
@example({b"prompt": b"x", b"logit_bias": b'{"1": Infinity}'})
@example({})
def test_a_hostile_entry_is_a_request_or_a_refusal_that_can_be_answered(fields: dict[bytes, bytes]) -> None:
    refusal, request = None, None
    try:
        request = parse(fields)
    except WireError as error:
        refusal = error
    if refusal is not None:
        assert refusal.code in {"invalid_request", "too_large"}
        assert ID_PATTERN.fullmatch(refusal.request_id)
        assert refusal.message
        assert refusal.message.isprintable()
        assert len(refusal.message) < 2000
    if request is not None:
        assert ID_PATTERN.fullmatch(request.id or "")
        assert parse(encoded(request.to_entry())) == request


def logprob_fields(data: str) -> dict[str, str]:
    """Returns a chunk whose token claims to have these bytes."""
    logprob = f'[{{"id": 1, "token": "a", "bytes": {data}, "logprob": 0, "top": []}}]'
    return {"type": "chunk", "index": "0", "offset": "0", "text": "", "tokens": "1", "logprobs": logprob}


@given(st.dictionaries(st.sampled_from(["type", *ChunkEntry.model_fields, *EndEntry.model_fields]), text, max_size=5))
@example({"type": "chunk", "index": "0", "offset": "0", "text": "", "tokens": "1", "logprobs": "[" * 50_000})
@example({"type": "chunk", "index": "0", "offset": "0", "text": "", "tokens": "1", "tool_calls": '[{"index": -1}]'})
@example(logprob_fields("[null]"))
@example(logprob_fields("[256]"))
@example(logprob_fields("[1e999]"))
@example(logprob_fields(f"[{10**30}]"))
@example(logprob_fields('"text"'))
def test_a_hostile_reply_entry_is_refused(fields: dict[str, str]) -> None:
    try:
        entry = decode_reply(fields)
    except WireError:
        return  # the only error there is
    assert decode_reply(encode_reply(entry)) == entry


def test_a_reply_entry_may_have_fields_that_this_reader_does_not_know() -> None:
    fields = {"type": "own", "worker": "w", "epoch": "1", "novelty": "x"}
    assert decode_reply(fields) == OwnEntry(worker="w", epoch=1)


def test_the_body_limit_counts_names_and_values() -> None:
    fields = encoded({"id": "mine", "prompt": "x" * 100})
    size = len("id") + len("mine") + len("prompt") + 100
    assert parse_request(ENTRY_ID, fields, max_body_bytes=size).id == "mine"
    with pytest.raises(WireError, match=f"has {size} bytes, the limit max_body_bytes is {size - 1}") as caught:
        parse_request(ENTRY_ID, fields, max_body_bytes=size - 1)
    assert (caught.value.code, caught.value.request_id) == ("too_large", "mine")


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"prompt": "x", "max_tokens": "0"}, "max_tokens"),
        ({"prompt": "x", "temprature": "1"}, "temprature"),
        ({"prompt": "x", "v": "2"}, "v:"),
        ({"prompt": "x", "stop": "[1"}, "stop"),
        ({"prompt": "x", "messages": "[]"}, "exactly one of prompt, messages, prompt_token_ids"),
        ({"max_tokens": "5"}, "exactly one of"),
        (
            {"request": "{}", "prompt": "x"},
            "only `id`, `affinity`, `priority`, `tenant`, `timeout_s` may be given, not prompt",
        ),
        ({"request": '"text"'}, "holds a string, not an object"),
        ({"request": '{"id": "b", "prompt": "x"}', "id": "a"}, "`id` a and `request.id` b differ"),
        ({"request": '{"priority": 1, "prompt": "x"}', "priority": "2"}, "2 and `request.priority` 1 differ"),
    ],
)
def test_a_refusal_names_the_field(fields: dict[str, str], told: str) -> None:
    with pytest.raises(WireError) as caught:
        parse(encoded(fields))
    assert told in caught.value.message


@pytest.mark.parametrize("count", [4096, 4097, 10_000])
def test_a_list_of_tokens_of_any_length_is_read_and_what_is_wrong_in_it_is_placed(count: int) -> None:
    ids = [*range(count)]
    for name in ("prompt_token_ids", "bad_token_ids"):
        fields = {"prompt": "x", name: json.dumps(ids)} if name != "prompt_token_ids" else {name: json.dumps(ids)}
        assert getattr(parse(encoded(fields)), name) == tuple(ids)
        with pytest.raises(WireError, match=rf"{name}\[{count - 1}\]: .* not -1"):
            parse(encoded({**fields, name: json.dumps([*ids[:-1], -1])}))


@pytest.mark.parametrize(
    "trace",
    [
        "",
        "none",
        TRACE.upper(),
        TRACE + "-more",  # only later versions may have more
        TRACE + "\n",
        TRACE + "\x1b[31m",
        TRACE.replace("00-4", "ff-4"),
        TRACE.replace("00-4", "01-4") + "-\x1b",
        TRACE.replace("00-4", "01-4") + "-" + "x" * 256,
        "00-" + "0" * 32 + "-00f067aa0ba902b7-01",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-" + "0" * 16 + "-01",
    ],
)
@pytest.mark.parametrize("form", ["flat", "document"])
def test_what_is_no_traceparent_is_passed_over(trace: str, form: str) -> None:
    """W3C's rule drops it, and its tracestate with it. A request made here is refused instead."""
    fields = {"prompt": "x", "traceparent": trace, "tracestate": "a=b"}
    request = parse(encoded(fields if form == "flat" else {"request": json.dumps(fields)}))
    assert (request.prompt, request.traceparent, request.tracestate) == ("x", None, None)
    with pytest.raises(ValidationError, match="traceparent") as caught:
        GenerateRequest(prompt="x", traceparent=trace)
    assert explain(caught.value).isprintable()


@pytest.mark.parametrize("trace", [7, None, ["00"], {"version": "00"}])
def test_a_trace_that_is_no_text_is_passed_over(trace: Any) -> None:
    request = parse(encoded({"request": json.dumps({"prompt": "x", "traceparent": trace, "tracestate": trace})}))
    assert (request.traceparent, request.tracestate) == (None, None)


@pytest.mark.parametrize("state", ["congo=t61rcWkgMzE", "a=1,b@c=2 , d-e/f*g=~!x", "a=b,,c=d,", ",".join(["a=b"] * 32)])
def test_a_tracestate_goes_with_its_traceparent(state: str) -> None:
    request = parse(encoded({"prompt": "x", "traceparent": TRACE, "tracestate": state}))
    assert (request.traceparent, request.tracestate) == (TRACE, state)
    assert parse(encoded({"prompt": "x", "tracestate": state})).tracestate is None


@pytest.mark.parametrize("state", ["", "a", "=b", "A=b", "a=b=c", "a=\x1b", ",", "a=" + "x" * 511, "a=b\n"])
def test_what_is_no_tracestate_is_passed_over(state: str) -> None:
    request = parse(encoded({"prompt": "x", "traceparent": TRACE, "tracestate": state}))
    assert (request.traceparent, request.tracestate) == (TRACE, None)
    with pytest.raises(ValidationError, match="tracestate"):
        GenerateRequest(prompt="x", traceparent=TRACE, tracestate=state)


def test_a_later_version_of_the_traceparent_may_have_more() -> None:
    trace = TRACE.replace("00-4", "01-4") + "-what.the/future:brings"
    assert parse(encoded({"prompt": "x", "traceparent": trace})).traceparent == trace


def test_the_id_beside_a_document_counts() -> None:
    assert parse(encoded({"request": '{"prompt": "x"}', "id": "a"})).id == "a"


def test_one_stop_string_needs_no_json() -> None:
    assert parse(encoded({"prompt": "x", "stop": "END"})).stop == ("END",)
    assert parse(encoded({"prompt": "x", "stop": '["a", "b"]'})).stop == ("a", "b")
