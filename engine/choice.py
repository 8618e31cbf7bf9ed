"""One choice of a request: reads its tokens as parts of a reply and finds where it ends."""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.engine.execution.sampling.logprobs import Logprobs
from penstock.engine.logprobs import PromptLogprobs, Spell, logprob_at
from penstock.engine.request import FinishReason, Output, Prefill, TokenLogprob
from penstock.engine.scheduling.sequence import Sequence
from penstock.engine.scheduling.step_plan import Row
from penstock.engine.text.reply import ReplyDecoder, ReplyStreams
from penstock.engine.text.response.reading.delta import NOTHING, Delta, ReplyEnd, joined
from penstock.engine.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Ending:
    reason: FinishReason
    stop_reason: str | int | None = None  # the stop string, or the token id
    error: str | None = None
    cause: Exception | None = None


class ChoiceState:
    """The reply of an unfinished sequence. Everything in it follows from the sequence's tokens."""

    __slots__ = ("_echo", "_max_model_len", "_prompt_logprobs", "_sequence", "_spell", "_stop_ids", "_stream")

    def __init__(
        self,
        sequence: Sequence,
        stream: ReplyDecoder,
        stop_ids: frozenset[int],
        max_model_len: int,
        spell: Spell,
    ) -> None:
        # The prompt's log-probabilities go out with the first token.
        self._prompt_logprobs = PromptLogprobs(sequence.request, spell) if sequence.scores_prompt else None
        self._spell = spell
        self._sequence = sequence
        self._stream = stream
        self._stop_ids = stop_ids
        self._max_model_len = max_model_len
        self._echo = sequence.request.echo  # goes out with the first token

    @property
    def num_reasoning(self) -> int:
        """Number of generated tokens so far that are reasoning."""
        return self._stream.num_reasoning

    @property
    def num_mended(self) -> int:
        """Number of its tool calls with a flaw that was mended."""
        return self._stream.num_mended

    def replay(self) -> Ending | None:
        """Restores the reply after tokens that an earlier run generated; returns the ending if they end the choice."""
        generated = self._sequence.token_ids[self._sequence.num_prompt :]
        if not generated:
            return None
        stop = self._stream.replay(generated[:-1])
        return self._stop(stop) if stop else self.push(generated[-1])[1]

    def push(self, token_id: int) -> tuple[Delta, Ending | None]:
        """Takes the sequence's newest token; returns the text it releases and, if the choice ends, its ending."""
        echo, self._echo = self._echo, ""
        delta, ending = self._read(token_id)
        return (joined(Delta(echo), delta) if echo else delta), ending

    def _read(self, token_id: int) -> tuple[Delta, Ending | None]:
        is_stop = token_id in self._stop_ids
        if is_stop and not self._sequence.request.sampling.include_stop_str_in_output:
            return self._stream.finish(), self._stop(token_id)
        delta, stop = self._stream.push(token_id)
        if stop:
            return delta, self._stop(stop)
        if is_stop:
            return joined(delta, self._stream.finish()), self._stop(token_id)
        if self._is_full():
            return joined(delta, self._stream.finish(ReplyEnd.CUT)), Ending("length")
        return delta, None

    def complete(self) -> tuple[Delta, Ending]:
        """Ends a choice whose grammar allows nothing more; returns the text held back and the ending."""
        return self._stream.finish(), self._stop(None)

    def _stop(self, stop_reason: str | int | None) -> Ending:
        return Ending("tool_calls" if self._stream.calls_tools else "stop", stop_reason)

    def finish(self) -> Delta:
        """Ends a choice for a reason that is not in its tokens; returns the text held back."""
        return self._stream.finish(ReplyEnd.CUT)

    def score(self, row: Row, found: Logprobs | None, place: int) -> None:
        """Takes the log-probabilities of a chunk of the prompt, from the rows starting at `place`."""
        if self._prompt_logprobs is not None and found is not None:
            self._prompt_logprobs.take(found, place, row.start, row.num_scored)

    def logprob(self, found: Logprobs | None, place: int) -> TokenLogprob | None:
        """Returns the log-probability of the newest token, drawn by the row at `place`, if the request asks for it."""
        count = self._sequence.request.sampling.logprobs
        if found is None or count is None:
            return None
        return logprob_at(found, place, self._sequence.token_ids[-1], count, self._spell)

    def with_prompt_logprobs(self, output: Output) -> Output:
        """Adds the prompt's log-probabilities to the `output` of a new token, if they are wanted and not sent yet."""
        if self._prompt_logprobs is None:
            return output
        of_prompt, self._prompt_logprobs = self._prompt_logprobs.all(), None
        return replace(output, prompt_logprobs=of_prompt)

    def _is_full(self) -> bool:
        num_tokens = len(self._sequence.token_ids)
        num_generated = num_tokens - self._sequence.num_prompt
        return num_generated >= self._sequence.request.sampling.max_tokens or num_tokens >= self._max_model_len


class NewChoices:
    """Makes the choices of one model. Only one thread at a time may use it."""

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: tuple[int, ...], max_model_len: int) -> None:
        self._streams = ReplyStreams(tokenizer)
        self._spell = tokenizer.spell
        self._eos_token_ids = eos_token_ids
        self._max_model_len = max_model_len

    def of(self, sequence: Sequence) -> ChoiceState:
        """Returns a new choice for `sequence`. Raises InvalidRequest as `ReplyStreams.stream` does."""
        stop_ids = frozenset(sequence.request.sampling.stop_ids(self._eos_token_ids))
        stream = self._streams.stream(sequence.request, sequence.index)
        return ChoiceState(sequence, stream, stop_ids, self._max_model_len, self._spell)


def prefill_output_of(row: Row) -> Output:
    """Returns the output for a row that computed a part of its sequence's prompt, not its end."""
    prefill = Prefill(row.start + row.num_tokens, len(row.sequence.token_ids))
    return replace(output_of(row.sequence, NOTHING), prefill=prefill)


def output_of(
    sequence: Sequence,
    delta: Delta,
    token_ids: tuple[int, ...] = (),
    logprob: TokenLogprob | None = None,
    ending: Ending | None = None,
    num_reasoning: int = 0,
) -> Output:
    """Returns the output for the newest `token_ids` of `sequence`. `num_reasoning` counts all its reasoning tokens."""
    output = Output(
        request_id=sequence.request.id,
        index=sequence.index,
        offset=len(sequence.token_ids) - sequence.num_prompt - len(token_ids),
        token_ids=token_ids,
        text=delta.text,
        reasoning=delta.reasoning,
        tool_calls=delta.tool_calls,
        logprobs=None if logprob is None else (logprob,),
        num_prompt_tokens=sequence.num_prompt,
        num_cached_tokens=sequence.num_cached,
    )
    if ending is None:
        return output
    return replace(
        output,
        num_reasoning_tokens=num_reasoning,
        num_drafted_tokens=sequence.num_drafted,
        num_accepted_tokens=sequence.num_accepted,
        finish_reason=ending.reason,
        stop_reason=ending.stop_reason,
        error=ending.error,
        cause=ending.cause,
    )
