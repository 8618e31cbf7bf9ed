"""All parameters of a request: the engine's, and those of prompts, forms and the queue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeAlias, get_args

from pydantic import Field

from penstock.parameters import ALL, BOTH, INT64, SENT, Parameter, SamplingParameters, declared
from penstock.protocol.ranks import HIGHEST_PRIORITY, LOWEST_PRIORITY
from penstock.protocol.wire.messages import MAX_TOOLS, ReasoningEffort, ResponseFormat, ToolChoice

MIN_KEEP_S = 60
"""Shortest time to keep a reply after its end, so that a worker that takes over from a dead one still sees the end."""

MAX_KEEP_S = 366 * 86_400
"""Longest time to keep a reply after its end; a worker's own limit is `max_keep_s`."""

_W3C = "https://www.w3.org/TR/trace-context/"

_Object: TypeAlias = Mapping[str, Any]


# fmt: off
class Sampling(SamplingParameters, total=False):
    """The options beside a prompt, with their meanings and ranges, and the names that OpenAI's API has for some."""

    max_completion_tokens: int
    top_logprobs: int
    n: Annotated[int, Parameter("How many completions.", 1, 64, default=1, takers=(*BOTH, "send"))]
    echo: Annotated[bool, Parameter(
        "The text begins with the prompt's text, or for a chat with the continued message. It comes with the first "
        "token and is not in `tokens`.", default=False, takers=BOTH)]

    tools: Annotated[Sequence[_Object], Parameter(
        "Functions that the model may call, as in OpenAI's API.", default=(), takers=("chat", "send"),
        values=f"list of at most {MAX_TOOLS} functions", more="See [Tools](#tools).")]
    tool_choice: Annotated[ToolChoice | _Object, Parameter(
        "none, auto, required, or one of the tools.", takers=("chat", "send"),
        values="`none`, `auto`, `required`, or an object", more="With tools, leaving it out means `auto`.")]
    parallel_tool_calls: Annotated[bool, Parameter(
        "Whether one answer may have several calls.", default=True, takers=("chat", "responses"))]
    reasoning_effort: Annotated[str, Parameter(
        "none, low, medium, high, or another level that the model knows.", takers=("chat", "send"),
        values=", ".join(f"`{effort}`" for effort in get_args(ReasoningEffort)),
        more="A variable of the template; `none` also sets `enable_thinking` and `thinking` to false.")]
    add_generation_prompt: Annotated[bool, Parameter(
        "Whether the prompt ends with the head of a new answer. Left out, it does, unless the final message is "
        "continued. `false` is refused if no message is continued and the answer has a form or is constrained to "
        "calls.", takers=("chat",))]
    continue_final_message: Annotated[bool, Parameter(
        "The answer continues the final message's content instead of beginning a new one.",
        default=False, takers=("chat",))]
    chat_template_kwargs: Annotated[_Object, Parameter(
        'Further variables of the template, such as `{"enable_thinking": false}`, but none that the worker sets.',
        takers=("chat", "responses", "messages"))]

    response_format: Annotated[ResponseFormat | _Object, Parameter(
        "A JSON schema that the answer follows, as in OpenAI's API.", takers=(*BOTH, "send"),
        more="See [Structured output](#structured-output).")]
    regex: Annotated[str, Parameter(
        "A regular expression that the answer matches. As in schemas, \\d is 0 to 9 and \\w is ASCII.", takers=SENT
    )]
    choice: Annotated[Sequence[str], Parameter("The answer is one of these.", default=())]
    grammar: Annotated[str, Parameter("A grammar that the answer follows, in Lark's notation.", takers=SENT)]

    priority: Annotated[int, Parameter(
        "Higher runs first.", LOWEST_PRIORITY, HIGHEST_PRIORITY, default=0, takers=ALL,
        more="That holds on all workers; see [lanes.md](lanes.md).")]
    timeout_s: Annotated[float, Parameter(
        "Deadline in seconds, whether the request waits or runs.", above=0, most=7 * 86_400, takers=ALL,
        more="It counts from the enqueue; the request then ends as `expired`.")]
    id: Annotated[str, Parameter(
        "Request id, instead of a random one.", otherwise="the entry's own id", takers=("send",), values="see above",
        more="It names the reply; see [Ids](#ids).")]
    keep_s: Annotated[float, Parameter(
        "The reply is kept for so many seconds after its end, at most the worker's `max_keep_s`.",
        MIN_KEEP_S, MAX_KEEP_S, otherwise="as the worker is set",
        takers=(*BOTH, "messages", "send"), more="See [Expiry](#expiry).")]
    tenant: Annotated[str, Parameter(
        "Whom the request is for: the workers' capacity is shared between tenants. Also in its state and in the "
        "worker's logs.", takers=(), values="as an id")]
    affinity: Annotated[str, Parameter(
        "Requests with the same value go to one worker, as long as it has capacity. So their common prefix is computed "
        "once; see [lanes.md](lanes.md#affinity).", values="as an id",
        otherwise="the first 1,000 characters of the prompt, if it is so long")]
    exact: Annotated[bool, Parameter(
        "Once the reply has begun, only workers that round alike continue it.", default=False, takers=ALL,
        more="It waits for one, and ends as `arithmetic_gone` if none comes; see "
        "[guarantees.md](guarantees.md#p3-the-work-resumes-not-only-the-stream).")]
    cache_salt: Annotated[str, Parameter(
        "Prefixes in the cache are shared only by requests with the same value.", values="text, 1 to 128 characters")]
    traceparent: Annotated[str, Parameter(
        "The trace that the request belongs to, for the worker's logs and spans ([tracing.md](tracing.md)); anything "
        "else is ignored.", takers=(),
        values=f"a [W3C traceparent]({_W3C}#traceparent-header), at most 256 characters")]
    tracestate: Annotated[str, Parameter(
        "What tracing systems add to it; ignored if it is not valid or there is no `traceparent`.", takers=(),
        values=f"a [W3C tracestate]({_W3C}#tracestate-header), at most 512 characters")]
# fmt: on


PARAMETERS = declared(Sampling)


def parameter(name: str, **more: Any) -> Any:
    """Makes the field of a parameter, with its default and range."""
    return Field(PARAMETERS[name].default, **in_range(name), **more)


def in_range(name: str) -> dict[str, Any]:
    """Returns a parameter's range as the arguments of a field. All integers have 64 bits."""
    each = PARAMETERS[name]
    most = {"le": each.most} if each.most not in (None, INT64) else {"lt": INT64 + 1}
    least = {"gt": each.above} if each.above is not None else {"ge": each.least}
    return least | most if each.range else {}
