"""From reply entries to chunks and a whole reply: each token once and in order, or an error."""

from __future__ import annotations

from penstock.producer.errors import ReplyCorrupt, RequestFailed, RequestRefused
from penstock.producer.reply import Choice, Chunk, Reply, Timings, Usage
from penstock.producer.wire import REFUSED_CODES, ChunkEntry, EndEntry, FinishReason, OwnEntry, ReplyEntry, TokenLogprob


class Assembler:
    """Feeds on the entries of one reply, in the order of their ids.

    Normally offsets simply count on. After a failover to a server that had forgotten the last entries, a new worker
    writes tokens again that were already read here; they are the same ones, so they are dropped by their offset.
    """

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._choices: dict[int, _Choice] = {}
        self.ended = False
        """Whether the end was read."""
        self.reply: Reply | None = None
        """The whole reply, once its end was read, unless the request was refused."""

    def feed(self, entry_id: str, entry: ReplyEntry) -> Chunk | None:
        """The part of the entry that is new, if any.

        Raises:
            ReplyCorrupt: tokens are missing before this entry.
            RequestRefused, RequestFailed: the entry is an end that says so.
        """
        if isinstance(entry, OwnEntry):
            return None
        if isinstance(entry, EndEntry):
            self._end(entry)
            return None
        choice = self._choices.get(entry.index)
        if choice is None:
            choice = self._choices[entry.index] = _Choice()
        try:
            return choice.feed(entry_id, entry)
        except ValueError as error:
            raise ReplyCorrupt(self._request_id, f"entry {entry_id}: {error}") from error

    def _end(self, end: EndEntry) -> None:
        self.ended = True
        if end.finish_reason == "error" and end.code in REFUSED_CODES:
            raise RequestRefused(self._request_id, end.code or "", end.message or "")
        num_read = sum(choice.num_tokens for choice in self._choices.values())
        if end.finish_reason != "error" and num_read != end.completion_tokens:
            reason = f"{num_read} tokens were read, the end entry counts {end.completion_tokens}"
            raise ReplyCorrupt(self._request_id, reason)
        self.reply = reply = self._whole(end)
        if end.finish_reason == "error":
            raise RequestFailed(self._request_id, end.code or "unknown", end.message or "no message given", reply)

    def _whole(self, end: EndEntry) -> Reply:
        num_choices = max([1, len(end.finish_reasons or ()), *(index + 1 for index in self._choices)])
        reasons = end.finish_reasons or ()
        return Reply(
            request_id=self._request_id,
            finish_reason=end.finish_reason,
            choices=tuple(
                self._choices.get(index, _Choice()).whole(
                    index, reasons[index] if index < len(reasons) else end.finish_reason
                )
                for index in range(num_choices)
            ),
            usage=Usage(end.prompt_tokens, end.cached_tokens, end.completion_tokens),
            timings=Timings(end.queued_ms, end.ttft_ms, end.total_ms),
        )


class _Choice:
    """One choice as far as it was read.

    `_at` is the writer's position, (tokens, characters). It falls behind what was read while a takeover repeats tokens,
    and then meets one of `_ends`: how many characters the first k tokens had, for each k that ended a chunk.
    """

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._num_chars = 0
        self._has_ended = False
        self._at = (0, 0)
        self._ends = {0: 0}

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    def feed(self, entry_id: str, entry: ChunkEntry) -> Chunk | None:
        if entry.offset > self._at[0]:
            raise ValueError(
                f"choice {entry.index} continues at token {entry.offset}, but only {self._at[0]} came before"
            )
        if entry.offset < self._at[0]:
            if entry.offset not in self._ends:
                raise ValueError(f"choice {entry.index} goes back to token {entry.offset}, where no chunk ended before")
            self._at = (entry.offset, self._ends[entry.offset])
        num_old_tokens = self.num_tokens - self._at[0]
        num_old_chars = self._num_chars - self._at[1]
        self._at = (self._at[0] + len(entry.tokens), self._at[1] + len(entry.text))
        self._ends[self._at[0]] = self._at[1]
        tokens, text = entry.tokens[num_old_tokens:], entry.text[num_old_chars:]
        ends_now = entry.finish_reason is not None and not self._has_ended
        self._has_ended |= ends_now
        if not tokens and not text and not ends_now:
            return None
        self._tokens += tokens
        self._texts.append(text)
        self._num_chars += len(text)
        logprobs = None if entry.logprobs is None else entry.logprobs[num_old_tokens:]
        self._logprobs += logprobs or ()
        offset = self.num_tokens - len(tokens)
        return Chunk(text, tokens, entry.index, offset, logprobs, entry_id, entry.finish_reason)

    def whole(self, index: int, finish_reason: FinishReason) -> Choice:
        logprobs = tuple(self._logprobs) if self._logprobs else None
        return Choice(index, "".join(self._texts), tuple(self._tokens), logprobs, finish_reason)
