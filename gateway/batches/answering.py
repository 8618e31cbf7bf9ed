"""Sends the lines of one batch to the queue, and turns each reply into a result."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from penstock.gateway.admission.admission import OutgoingRequest, has_tabs, order_for
from penstock.gateway.admission.request_ids import hashed_id
from penstock.gateway.batches.documents import answered, token_counts, unanswered
from penstock.gateway.batches.lines import BatchLine
from penstock.gateway.batches.stopping import Stopped, retried
from penstock.gateway.batches.stored import StoredBatch
from penstock.gateway.batches.work import BatchWork, LineTarget, work_of
from penstock.gateway.common.documents import check_ended
from penstock.gateway.context import Gateway
from penstock.gateway.errors import ApiError
from penstock.gateway.generation.jobs import read_whole
from penstock.gateway.http.passed_over import pass_over_unshown, reading_fields
from penstock.gateway.http.unexpected import internal_error, log_unexpected
from penstock.gateway.keys.records import ApiKey
from penstock.producer import Chunk, GenerateRequest, PenstockError, Reply, ServerRefused
from penstock.protocol import keys
from penstock.protocol.tasks import end_tasks
from penstock.protocol.wire import MIN_KEEP_S

CANCEL_WAIT_S = 5.0
"""A worker sees a cancellation within a fraction of this; without a worker the request never ends."""

LAST_S = 2.0
"""A request that expires this shortly before the batch expires together with it."""


@dataclass(frozen=True, slots=True)
class LineOutcome:
    """The result of a line: a line of the output file, or of the error file."""

    data: bytes
    is_good: bool
    queue: str
    request_ids: Sequence[str]
    counts: Mapping[str, int] = field(default_factory=dict)  # tokens, by the batch's names for them


class Answering:
    """Answers a batch's lines.

    Args:
        gateway: the process's.
        batch: the batch.
        key: the owner's API key; None: callers without a key own the batch.
        queues: maps model names, as the lines have them, to queues.
        deadline_s: when the batch expires, on the loop's clock.
        stopped: says whether the batch was ended early.
    """

    def __init__(
        self,
        gateway: Gateway,
        batch: StoredBatch,
        key: ApiKey | None,
        queues: Mapping[str, str],
        deadline_s: float,
        stopped: Stopped,
    ) -> None:
        self._gateway = gateway
        self._batch = batch
        self._key = key
        self._queues = queues
        self._deadline_s = deadline_s
        self._stopped = stopped
        self._is_cluster = gateway.store.address.kind == "cluster"

    async def outcome(self, line: BatchLine) -> LineOutcome:
        """Returns a line's answer, or its error once retrying can't help or the batch has stopped."""
        if self._stopped.code is not None:
            return await self._end(line)
        try:
            outcome = await self._stopped.unless(retried(partial(self._attempt, line), self._gateway.standing))
        except ApiError as error:
            return await self._failed(line, error)
        except ServerRefused:
            raise
        except Exception as error:  # whatever it is, the other lines go on
            log_unexpected("batch_line_failed", error, batch_id=self._batch.id, line=line.place)
            return await self._failed(line, internal_error())
        return outcome or await self._end(line)

    async def _failed(self, line: BatchLine, error: ApiError) -> LineOutcome:
        if error.code == "expired" and self._left_s < LAST_S:
            await self._stopped.wait(LAST_S)
            return self._unanswered(line)
        return self._outcome(line, answered(self._id(line, 0), line.custom_id, error.status, error.body()))

    async def forget(self, outcome: LineOutcome) -> None:
        """Drops a line's replies after its result was kept."""
        expiries = [
            self._gateway.store.execute("EXPIRE", keys.reply(outcome.queue, request_id), MIN_KEEP_S)
            for request_id in outcome.request_ids
        ]
        await asyncio.gather(*expiries, return_exceptions=True)  # else they expire by themselves, later

    async def _attempt(self, line: BatchLine) -> LineOutcome:
        place = await self._place(line)
        work = await self._work(line, place)
        replies = await self._all(place, work)
        return self._good(line, work, replies)

    async def _work(self, line: BatchLine, place: LineTarget) -> BatchWork:
        """Returns a line's work. A result has no place for headers, so only the log says what was passed over."""
        with reading_fields(is_strict=self._gateway.settings.strict_fields) as notes:
            work = await work_of(self._batch.endpoint, line, place, partial(self._id, line))
            pass_over_unshown(place.card, work.requests)
        notes.log(self._batch.endpoint)
        return work

    def _good(self, line: BatchLine, work: BatchWork, replies: Sequence[Reply]) -> LineOutcome:
        for reply in replies:
            check_ended(reply)
        data = answered(self._id(line, 0), line.custom_id, 200, work.body(replies))
        return LineOutcome(
            data,
            is_good=True,
            queue=self._queues[line.model],
            request_ids=[reply.request_id for reply in replies],
            counts=token_counts([reply.usage for reply in replies]),
        )

    async def _all(self, place: LineTarget, work: BatchWork) -> Sequence[Reply]:
        tasks = [asyncio.create_task(self._reply(place, request, work.each)) for request in work.requests]
        try:
            return await asyncio.gather(*tasks)
        finally:
            await end_tasks(tasks)

    async def _reply(
        self, place: LineTarget, request: GenerateRequest, each: Callable[[Chunk], object] | None
    ) -> Reply:
        """Reads a reply. It is charged once to the owner's tokens per minute, even after a takeover."""
        if self._key is None or not has_tabs(self._key.limits):
            return await read_whole(place.client.stream(request), each)
        settling, limits = self._gateway.key_manager.settling, self._key.limits
        sent = OutgoingRequest(place.queue, request.id or "", request, is_shared=True, is_at_once=False)
        order = order_for(self._key.id, sent, place.card.max_model_len)
        await settling.reserve(self._key.id, limits, [order])
        try:
            reply = await read_whole(place.client.stream(request), each)
        except BaseException:
            await settling.leave(order.tab)
            raise
        await settling.close(order.tab, reply.usage.prompt_tokens + reply.usage.completion_tokens)
        return reply

    async def _end(self, line: BatchLine) -> LineOutcome:
        """Ends a line of a batch that has stopped: returns its answer if it has one by now, or else cancels its
        requests.
        """
        with suppress(ApiError, PenstockError, TimeoutError):
            async with asyncio.timeout(2 * CANCEL_WAIT_S):
                place = await self._place(line)
                work = await self._work(line, place)
                replies = [await self._ended(place, request.id or "", work.each) for request in work.requests]
                there = [reply for reply in replies if reply is not None]
                if len(there) == len(work.requests):
                    return self._good(line, work, there)
        return self._unanswered(line)

    async def _ended(self, place: LineTarget, request_id: str, each: Callable[[Chunk], object] | None) -> Reply | None:
        """Returns the reply; None: the request was never sent."""
        handle = place.client.handle(request_id)
        state = await handle.state()
        if state == "unknown":
            return None
        if state != "finished":
            await handle.cancel()
        return await read_whole(handle.stream(timeout=CANCEL_WAIT_S), each)

    async def _place(self, line: BatchLine) -> LineTarget:
        queue = self._queues[line.model]
        return LineTarget(
            client=self._gateway.client.on(queue),
            queue=queue,
            card=await self._gateway.directory.card_of(queue),
            owner=self._batch.owner,
            tenant=None if self._key is None else self._key.tenant,
            isolates_prefix_cache=self._gateway.settings.isolate_prefix_cache,
            timeout_s=max(1.0, self._left_s),
            max_prompts=self._gateway.settings.max_prompts,
        )

    def _unanswered(self, line: BatchLine) -> LineOutcome:
        code, message = self._stopped.code or "batch_expired", self._stopped.message
        return self._outcome(line, unanswered(self._id(line, 0), line.custom_id, code, message))

    def _outcome(self, line: BatchLine, data: bytes) -> LineOutcome:
        return LineOutcome(data, is_good=False, queue=self._queues[line.model], request_ids=(self._id(line, 0),))

    def _id(self, line: BatchLine, number: int) -> str:
        """Returns a request id that is the same after a takeover, so that running requests are joined."""
        return hashed_id("b", self._batch.id, line.custom_id, number, is_cluster=self._is_cluster)

    @property
    def _left_s(self) -> float:
        return self._deadline_s - asyncio.get_running_loop().time()
