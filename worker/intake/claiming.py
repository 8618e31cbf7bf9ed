"""Claims queue entries: from then on their requests are this worker's, until another one claims them."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from penstock.protocol import keys, scripts
from penstock.protocol.consumers import kind_of
from penstock.protocol.redis.connection import RedisClient
from penstock.protocol.redis.pipeline import Batcher
from penstock.protocol.scripts import Claim, NotClaimed
from penstock.protocol.wire import WireError, parse_request
from penstock.worker.config import WorkerConfig
from penstock.worker.logs import request_logger
from penstock.worker.metrics import WorkerMetrics
from penstock.worker.publish.ending import NOT_OURS, dead_letter_of, observe_letter, observe_loss, unclaimed_end
from penstock.worker.publish.outbox import Outbox
from penstock.worker.redis import retries
from penstock.worker.redis.guarded import execute_one
from penstock.worker.run.entries import QueueEntry
from penstock.worker.run.requests import Asked, LiveRequest
from penstock.worker.threads import Threads

if TYPE_CHECKING:
    from penstock.worker.run.spans import RequestSpans

SUSPECT_STRIKES = 2  # from here on a request runs alone, so that the next crash shows which request caused it


class Suspect(Exception):
    """Raised for a request that was present at several crashes: it is claimed again when it can run alone.

    Until then it counts as queued, so the crash of another suspect is not held against it. `live` is the request.
    """

    def __init__(self, live: LiveRequest) -> None:
        super().__init__(live.id)
        self.live = live


class Occupied(Exception):
    """A suspect runs alone here. The request was given back, and its entry has to wait again."""


class GoesOn(Exception):
    """Raised if an entry was taken only to end its request, and the request is not over. Unclaimed, it waits again."""


class Claimer:
    """Claims entries for one process."""

    def __init__(
        self,
        redis: RedisClient,
        config: WorkerConfig,
        instance: str,
        threads: Threads,
        outbox: Outbox,
        metrics: WorkerMetrics,
        digest: str = "",
        arithmetic: str = "",
        spans: RequestSpans | None = None,
    ) -> None:
        self._redis = redis
        self._batcher = Batcher(redis, retries=0)  # the entries of one read are claimed together
        self._config = config
        self._instance = instance
        self._threads = threads
        self._outbox = outbox
        self._requests = outbox.requests
        self._metrics = metrics
        self._latency = metrics.redis_seconds.labels(operation="claim")
        self._digest, self._arithmetic = digest, arithmetic  # of the model and of this worker
        self._spans = spans  # None: requests are not traced

    async def close(self) -> None:
        await self._batcher.close()

    async def claim(self, entry: QueueEntry, *, alone: bool = False, only_over: bool = False) -> LiveRequest | None:
        """Claims the request of an entry. None: there is nothing to run, and the entry is about to leave the queue.

        Args:
            entry: as it was read.
            alone: whether nothing else runs here, as suspects require.
            only_over: whether to end the request without running it: it was cancelled, or its deadline has passed.

        Raises:
            Suspect: the request must run alone.
            Occupied: a suspect runs alone here.
            GoesOn: `only_over` is set, and the request is not over.
            RedisError: the server is in trouble; the entry stays pending, and claiming it again is safe.
        """
        if entry.is_deleted:
            self._outbox.remove(entry.unbilled)
            return None
        taken_s = time.monotonic()
        asked = await self._threads.read(lambda: _parse(entry, self._config.max_body_bytes), entry.fields)
        request_id = asked.request_id if isinstance(asked, WireError) else asked.id or entry.id
        claim = await self._take_epoch(request_id, entry, asked, only_over=only_over)
        if claim is None:
            return None
        log = _logger_of(request_id, asked)
        live = LiveRequest(self._config.queue, request_id, entry, claim, time.monotonic(), asked, log)
        if not alone:
            await self._check_company(live)
        self._replace(live)
        if self._spans is not None:
            live.trace = self._spans.begin(live, taken_s)
        self._metrics.claims.inc()
        self._metrics.resumed.inc(claim.has_journal)
        if not claim.is_exact:
            self._metrics.inexact.inc()
            log.info("goes_on_inexactly", arithmetic=self._arithmetic)
        return live

    async def _check_company(self, live: LiveRequest) -> None:
        """Accepts a request that may run now, or that ends without a run. Gives any other back, and raises."""
        is_suspect = live.claim.strikes >= SUSPECT_STRIKES
        if not (is_suspect or self._requests.alone) or self._is_over(live):
            return
        returning = scripts.return_request(live.queue, live.id, epoch=live.claim.epoch, handbacks=0)
        await execute_one(self._redis, returning)
        raise Suspect(live) if is_suspect else Occupied

    def _is_over(self, live: LiveRequest) -> bool:
        """Checks whether a request ends without a run."""
        claim = live.claim
        if isinstance(live.asked, WireError) or claim.is_cancelled or claim.only_ends:
            return True
        deadline_s = live.deadline_of(live.asked.timeout_s)
        return claim.strikes >= self._config.max_attempts or (deadline_s is not None and deadline_s <= time.monotonic())

    def _replace(self, live: LiveRequest) -> None:
        previous = self._requests.get(live.id)
        if previous is not None:  # this worker was frozen, lost the request, and has it back
            self._requests.let_go(previous)
            observe_loss(self._metrics, previous, "fenced")
        self._requests.add(live)

    async def _take_epoch(
        self, request_id: str, entry: QueueEntry, asked: Asked, *, only_over: bool = False
    ) -> Claim | None:
        only_over = only_over and not isinstance(asked, WireError)  # a malformed request ends whenever it is claimed
        try:
            answer = await self._try_claim(request_id, entry.id, asked, only_over=only_over)
            gone_entry = ""
            if isinstance(answer, NotClaimed) and answer.reason == "duplicate" and await self._is_gone(answer):
                gone_entry = answer.other_entry
                answer = await self._try_claim(request_id, entry.id, asked, gone_entry, only_over=only_over)
            if isinstance(answer, NotClaimed) and answer.reason in ("other_model", "other_arithmetic"):
                if await self._set_aside(request_id, entry, asked, answer):
                    return None
                answer = await self._try_claim(request_id, entry.id, asked, gone_entry, of_any_kind=True)
        except retries.REDIS_ERRORS as error:
            if retries.must_wait(error):
                raise
            _logger_of(request_id, asked).error("reply_unwritable", error=str(error))
            self._give_up(request_id, entry, asked, NOT_OURS)
            return None
        if isinstance(answer, Claim):
            return answer
        if answer.reason == "goes_on":
            raise GoesOn
        self._remove(request_id, entry, asked, answer)
        return None

    def _remove(self, request_id: str, entry: QueueEntry, asked: Asked, answer: NotClaimed) -> None:
        if answer.reason == "unwritable":
            self._give_up(request_id, entry, asked, "the reply holds an entry id that nothing can be written after")
        elif answer.reason == "junk":
            _logger_of(request_id, asked).error("reply_unwritable", error=f"the state's {answer.field} is not a number")
            self._give_up(request_id, entry, asked, NOT_OURS)
        elif answer.reason == "dead":  # its worker died between writing the end and the dead letter
            self._bury(request_id, entry, "given_up", "given up by an earlier worker; the end of the reply says why")
        else:
            is_duplicate = answer.reason == "duplicate"
            self._metrics.duplicates.inc(is_duplicate)
            self._outbox.remove(entry.unbilled if is_duplicate else replace(entry.unbilled, ended_id=request_id))

    def _give_up(self, request_id: str, entry: QueueEntry, asked: Asked, message: str) -> None:
        """Ends a request that can't be claimed: its keys hold something that no worker writes."""
        self._outbox.tell(unclaimed_end(request_id, asked, message, self._config))
        self._bury(request_id, entry, "reply_unwritable", message)

    def _bury(self, request_id: str, entry: QueueEntry, code: str, message: str) -> None:
        letter = dead_letter_of(request_id, entry.id, entry.kept, code, message, self._config)
        observe_letter(self._metrics, letter)
        self._outbox.remove(letter)

    async def _set_aside(self, request_id: str, entry: QueueEntry, asked: Asked, why: NotClaimed) -> bool:
        """Leaves a half-written reply to workers of the kind that began it. False: it can't be left.

        Then the time for that is over, or there are no such workers.
        """
        is_of_model = why.reason == "other_model"
        must_wait = is_of_model or _is_exact(asked)
        command = scripts.set_aside(
            self._config.queue,
            worker=self._config.name,
            entry_id=entry.id,
            kind=why.digest if is_of_model else kind_of(why.digest, why.arithmetic),
            wait_ms=None if must_wait else round(1000 * self._config.exact_wait_s),
            is_new=entry.was_here,
        )
        is_left = bool(await execute_one(self._redis, command))
        log = _logger_of(request_id, asked)
        if is_of_model:
            log.info("left_to_other_model" if is_left else "model_gone", digest=why.digest)
        elif is_left or must_wait:
            log.info("left_to_other_arithmetic" if is_left else "arithmetic_gone", arithmetic=why.arithmetic)
        return is_left

    async def _try_claim(
        self,
        request_id: str,
        entry_id: str,
        asked: Asked,
        gone_entry: str = "",
        *,
        of_any_kind: bool = False,
        only_over: bool = False,
    ) -> Claim | NotClaimed:
        tenant, timeout_s = (None, None) if isinstance(asked, WireError) else (asked.tenant, asked.timeout_s)
        command = scripts.claim(
            self._config.queue,
            request_id,
            entry_id=entry_id,
            worker=self._config.name,
            instance=self._instance,
            ttl_ms=round(self._config.reply_ttl_s * 1000),
            gone_entry=gone_entry,
            tenant=tenant or "",
            digest=self._digest,
            arithmetic=self._arithmetic,
            any_model=of_any_kind,
            any_arithmetic="" if not of_any_kind else "end" if _is_exact(asked) else "continue",
            timeout_ms=None if timeout_s is None else round(1000 * timeout_s),
            only_over=only_over,
        )
        with self._latency.time():
            answer = await self._batcher.execute(*command)
        return scripts.parse_claim(answer, self._instance, self._arithmetic)

    async def _is_gone(self, other: NotClaimed) -> bool:
        """Checks whether somebody deleted the request's first claimed entry before an end was written."""
        entry = other.other_entry
        return not await self._redis.xrange(keys.requests(self._config.queue), min=entry, max=entry)


def _logger_of(request_id: str, asked: Asked) -> Any:
    if isinstance(asked, WireError):
        return request_logger(request_id)
    return request_logger(request_id, tenant=asked.tenant, traceparent=asked.traceparent)


def _is_exact(asked: Asked) -> bool:
    return not isinstance(asked, WireError) and asked.exact


def _parse(entry: QueueEntry, max_body_bytes: int) -> Asked:
    try:
        return parse_request(entry.id, entry.fields, max_body_bytes=max_body_bytes, size=entry.size)
    except WireError as error:
        return error
