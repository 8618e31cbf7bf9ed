"""One choice of one request: what its tokens mean, as text and as an end."""

from __future__ import annotations

from penstock.engine.execution.sampling import Logprobs
from penstock.engine.request import FinishReason, Output, TokenLogprob, TopLogprob
from penstock.engine.scheduling.sequence import Sequence
from penstock.engine.text.stream import TextStream


class Choice:
    """The text of an unfinished sequence. Everything in it follows from the sequence's tokens."""

    __slots__ = ("_max_model_len", "_sequence", "_stop_ids", "_stream")

    def __init__(self, sequence: Sequence, stream: TextStream, stop_ids: frozenset[int], max_model_len: int) -> None:
        self._sequence = sequence
        self._stream = stream
        self._stop_ids = stop_ids
        self._max_model_len = max_model_len

    def replay(self) -> FinishReason | None:
        """Brings the text to where an earlier run was that generated tokens; says why, if it ended with them."""
        generated = self._sequence.token_ids[self._sequence.num_prompt :]
        if not generated:
            return None
        if self._stream.replay(generated) or generated[-1] in self._stop_ids:
            return "stop"
        return "length" if self._is_full() else None

    def push(self, token_id: int) -> tuple[str, FinishReason | None]:
        """Takes the sequence's newest token: the text that it releases, and why the choice ends, if it does."""
        if token_id in self._stop_ids:
            return self._stream.finish(), "stop"
        text, is_stopped = self._stream.push(token_id)
        if is_stopped:
            return text, "stop"
        if self._is_full():
            return text + self._stream.finish(), "length"
        return text, None

    def finish(self) -> str:
        """The text that was held back, of a choice that ends for a reason that is not in its tokens."""
        return self._stream.finish()

    def _is_full(self) -> bool:
        num_tokens = len(self._sequence.token_ids)
        num_generated = num_tokens - self._sequence.num_prompt
        return num_generated >= self._sequence.request.sampling.max_tokens or num_tokens >= self._max_model_len


def output_of(
    sequence: Sequence,
    text: str,
    token_ids: tuple[int, ...] = (),
    logprob: TokenLogprob | None = None,
    finish_reason: FinishReason | None = None,
    error: str | None = None,
    cause: Exception | None = None,
) -> Output:
    """`token_ids` are the newest tokens of `sequence`."""
    return Output(
        request_id=sequence.request.id,
        index=sequence.index,
        offset=len(sequence.token_ids) - sequence.num_prompt - len(token_ids),
        token_ids=token_ids,
        text=text,
        logprobs=None if logprob is None else (logprob,),
        finish_reason=finish_reason,
        error=error,
        cause=cause,
        num_prompt_tokens=sequence.num_prompt,
        num_cached_tokens=sequence.num_cached,
    )


def logprob_of(sequence: Sequence, logprobs: Logprobs | None, place: int) -> TokenLogprob | None:
    """Of the row at `place` in a step's results, if its request asks for them."""
    count = sequence.request.sampling.logprobs
    if logprobs is None or count is None:
        return None
    top = zip(logprobs.top_ids[place, :count].tolist(), logprobs.top[place, :count].tolist(), strict=True)
    most_likely = tuple(TopLogprob(token_id, "", b"", value) for token_id, value in top)
    return TokenLogprob(sequence.token_ids[-1], "", b"", float(logprobs.sampled[place]), most_likely)
