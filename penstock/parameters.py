"""The parameters of a request, each declared once: type, meaning, range, default, who takes it, and since when.

Here are those that the engine honours; `protocol.wire.parameters` adds those of prompts, forms and the queue. What
callers pass, fields on the wire and over HTTP, the engine's checks, options of `penstock send` and the table in
docs/wire.md all follow from these declarations.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeAlias, TypedDict, get_args, get_type_hints

Taker: TypeAlias = Literal["chat", "completions", "responses", "messages", "send"]
"""An HTTP API of the gateway, or the command `penstock send`."""

BOTH: tuple[Taker, ...] = ("chat", "completions")
OPENAI: tuple[Taker, ...] = (*BOTH, "responses")
SENT: tuple[Taker, ...] = (*OPENAI, "send")
ALL: tuple[Taker, ...] = (*SENT, "messages")

MODEL = "model"
"""In `otherwise`: if the parameter is left out, the model's `generation_config.json` gives its value."""

FIRST = "0.1"
"""The version that introduced most parameters."""

INT64 = 2**63 - 1
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 100.0  # in absolute value, as in OpenAI's API


@dataclass(frozen=True, slots=True)
class Parameter:
    """Meaning and range of a parameter, in the `Annotated` of its declaration.

    Attributes:
        text: what it means, for people.
        least, most: its bounds; those of a map are of its values.
        above: what it exceeds, in the place of `least`.
        default: its value where it is left out; None: `otherwise` says what holds then.
        otherwise: what holds where it is left out and has no default.
        takers: who takes it under this name and in this form.
        values: what it can be, where type and range do not tell.
        more: what docs/wire.md adds to the text.
        since: the first version that has it.
        type: what callers pass, as it is declared.
    """

    text: str
    least: float | None = None
    most: float | None = None
    above: float | None = None
    default: object = None
    otherwise: str = "none"
    takers: tuple[Taker, ...] = OPENAI
    values: str = ""
    more: str = ""
    since: str = FIRST
    type: Any = None

    @property
    def range(self) -> str:
        """The range in words, such as `0 to 100`; empty if there is none."""
        if self.least is None and self.above is None:
            return ""
        if self.most is None:
            return f"{self.least} or more"
        most = "2**63 - 1" if self.most == INT64 else f"{self.most:.15g}"
        return f"{self.least:.15g} to {most}" if self.above is None else f"above {self.above:.15g}, up to {most}"

    def fault(self, value: Any) -> str | None:
        """Returns what the value must be and is not, or None. NaN is in no range."""
        is_enough = value > self.above if self.above is not None else self.least is None or value >= self.least
        is_right = is_enough and (self.most is None or value <= self.most)
        return None if is_right else f"must be {self.range}, not {value}"


@functools.cache
def declared(parameters: type) -> Mapping[str, Parameter]:
    """Returns what such a class declares, by name and in its order."""
    types, hints = get_type_hints(parameters), get_type_hints(parameters, include_extras=True)
    return {
        name: replace(each, type=types[name])
        for name, hint in hints.items()
        for each in get_args(hint)[1:]
        if isinstance(each, Parameter)
    }


# fmt: off
class SamplingParameters(TypedDict, total=False):
    """How tokens are chosen, which log-probabilities are returned, and when to stop."""

    max_tokens: Annotated[int, Parameter(
        "Tokens to generate at most.", 1, default=256, takers=(*BOTH, "messages", "send"), more="For each choice.")]
    min_tokens: Annotated[int, Parameter(
        "Tokens before which neither a stop token nor a stop string ends the answer.", 0, default=0, takers=SENT,
        more="Not above `max_tokens`.")]
    temperature: Annotated[float, Parameter("Sampling temperature; 0 is greedy.", 0, 100, otherwise=MODEL, takers=ALL)]
    top_p: Annotated[float, Parameter(
        "Nucleus sampling: from the most likely tokens with this total probability.",
        above=0, most=1, otherwise=MODEL, takers=ALL)]
    top_k: Annotated[int, Parameter(
        "Sample from this many most likely tokens; 0: from all.", 0, otherwise=MODEL, takers=ALL)]
    min_p: Annotated[float, Parameter(
        "Drop tokens below this fraction of the most likely one's probability.", 0, 1, otherwise=MODEL, takers=SENT)]
    seed: Annotated[int, Parameter(
        "The same seed gives the same tokens.", 0, INT64, otherwise="drawn from the id", takers=ALL)]
    repetition_penalty: Annotated[float, Parameter(
        "Above 1 makes tokens of prompt and answer less likely.", above=0, most=100, otherwise=MODEL, takers=SENT)]
    presence_penalty: Annotated[float, Parameter(
        "Subtracted from the logits of generated tokens.", -2, 2, default=0.0, takers=SENT)]
    frequency_penalty: Annotated[float, Parameter("The same, once per occurrence.", -2, 2, default=0.0, takers=SENT)]
    logit_bias: Annotated[Mapping[int, float], Parameter(
        "Added to the logits of these tokens; a token that is forbidden stays forbidden.",
        -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)]
    allowed_token_ids: Annotated[Sequence[int], Parameter("When given, no other tokens are sampled.", default=())]
    bad_token_ids: Annotated[Sequence[int], Parameter("Never sampled.", default=())]
    stop: Annotated[str | Sequence[str], Parameter("Stop string: the text ends before it.", default=(), takers=SENT)]
    stop_token_ids: Annotated[Sequence[int], Parameter("The text ends at the first of these.", default=())]
    ignore_eos: Annotated[bool, Parameter("Generate past the end-of-sequence token.", default=False, takers=SENT)]
    logprobs: Annotated[int | bool, Parameter(
        "Return log-probabilities, with this many top tokens.", 0, MAX_LOGPROBS, takers=(*BOTH, "send"))]
    prompt_logprobs: Annotated[int, Parameter(
        "The same for the tokens of the prompt, whatever the sampling options. For k and a prompt of m tokens, "
        "m * (k + 1) may be at most 8,192.", 0, MAX_LOGPROBS, takers=BOTH)]
    include_stop_str_in_output: Annotated[bool, Parameter(
        "The stop string, or the stop token's text, stays at the end of the text.", default=False)]
    skip_special_tokens: Annotated[bool, Parameter(
        "If false, special tokens appear in the text, spelled out. One that ends the text appears only with "
        "`include_stop_str_in_output`.", default=True)]
# fmt: on
