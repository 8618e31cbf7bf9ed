"""What happens to one queue entry between its reading and the engine: parse, claim, restore, refuse or run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from redis import exceptions

from penstock.engine.driver import DriverStopped, EngineDriver
from penstock.engine.errors import RequestError
from penstock.engine.generation_defaults import GenerationDefaults
from penstock.engine.request import Request
from penstock.producer import keys
from penstock.producer.redis.connection import Fields, RedisClient
from penstock.producer.redis.pipeline import Batcher
from penstock.producer.wire import GenerateRequest, WireError, parse_request
from penstock.worker.config import WorkerConfig
from penstock.worker.delivery.admission import TextEncoder, check_limits, encode_prompt, to_engine_request
from penstock.worker.delivery.ending import dead_letter, dead_letter_of, unclaimed_end
from penstock.worker.delivery.entries import QueueEntry
from penstock.worker.delivery.journal import Journal, JournalError, read_journal
from penstock.worker.delivery.publisher import Publisher
from penstock.worker.delivery.requests import LiveRequest, LiveTable, ServerClock
from penstock.worker.errors import RedisRefused
from penstock.worker.logs import request_logger
from penstock.worker.metrics import Metrics
from penstock.worker.protocol import faults, scripts
from penstock.worker.protocol.scripts import Claim, NotClaimed

_T = TypeVar("_T")

TOKENIZER_THREADS = 2
CHAT_THREADS = 2  # a chat template renders in as many processes at once
MAX_JOURNAL_READS = 8  # each holds a connection
SMALL_BYTES = 4096  # an entry of this size is read and tokenised sooner than a thread has taken it on
SUSPECT_STRIKES = 2  # from here on a request runs alone, so that the next crash tells who did it


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request that is ready for the engine."""

    live: LiveRequest
    request: Request


class Suspect(Exception):
    """The request was there at several crashes: it is to be admitted again when it can run alone.

    Until then it counts as queued, so that it has no part in the crash of another suspect.
    """


class Claimer:
    """Claims entries for one process. Everything that takes long runs in threads of its own."""

    def __init__(
        self,
        redis: RedisClient,
        config: WorkerConfig,
        instance: str,
        text: TextEncoder,
        defaults: GenerationDefaults,
        driver: EngineDriver,
        table: LiveTable,
        publisher: Publisher,
        metrics: Metrics,
    ) -> None:
        self._redis = redis
        self._batcher = Batcher(redis, retries=0)  # the entries that one read brings are claimed together
        self._reads = asyncio.Semaphore(MAX_JOURNAL_READS)
        self._config = config
        self._instance = instance
        self._text = text
        self._defaults = defaults
        self._driver = driver
        self._table = table
        self._publisher = publisher
        self._metrics = metrics
        self._threads = ThreadPoolExecutor(TOKENIZER_THREADS, thread_name_prefix="penstock-tokenizer")
        self._chat_threads = ThreadPoolExecutor(CHAT_THREADS, thread_name_prefix="penstock-chat")

    async def close(self) -> None:
        for threads in (self._threads, self._chat_threads):
            threads.shutdown(wait=False, cancel_futures=True)
        await self._batcher.close()

    async def admit(self, entry: QueueEntry, *, alone: bool = False) -> Admitted | None:
        """Claims the request of a queue entry. None: it needs no generation, and its end is on its way if it needs one.

        Args:
            entry: as it was read.
            alone: that nothing else runs, which suspects need.

        Raises:
            Suspect: it must run alone.
            RedisError: the server is in trouble; the entry stays pending, and admitting it again is safe.
            RedisRefused: the server will go on refusing.
        """
        parsed = await self._apart(entry.fields, lambda: _parse(entry, self._config.max_body_bytes))
        request_id = parsed.request_id if isinstance(parsed, WireError) else parsed.id or entry.id
        claim = await self._claim(request_id, entry.id, entry.kept)
        if claim is None:
            return None
        if SUSPECT_STRIKES <= claim.strikes < self._config.max_attempts and not alone:
            await self._redis.execute_command(
                *scripts.return_request(self._config.queue, request_id, epoch=claim.epoch, handbacks=0)
            )
            raise Suspect
        clock = ServerClock(claim.server_ms, time.monotonic())
        log = request_logger(request_id, None if isinstance(parsed, WireError) else parsed.traceparent)
        live = LiveRequest(self._config.queue, request_id, entry.id, claim, clock, log, entry.kept)
        live.refresh_at_s = clock.monotonic_s + self._config.reply_ttl_s / 2
        previous = self._table.get(request_id)
        if previous is not None:  # this worker was frozen, lost the request, and now has it back
            self._publisher.drop(previous, "fenced")
        self._table.add(live)
        self._metrics.claims.inc()
        self._metrics.resumed.inc(claim.has_journal)
        return await self._prepare(live, parsed)

    def submit(self, admitted: Admitted) -> None:
        """Hands a request to the engine, unless it has ended meanwhile.

        Raises:
            DriverStopped: the engine's thread is not running.
        """
        live = admitted.live
        if live.end is not None or live.dropped:
            return
        try:
            self._driver.submit(admitted.request, lambda output: self._publisher.push(live, output))
        except RequestError as error:
            self._refuse(live, error.code, str(error))
        except DriverStopped:
            raise
        except Exception:
            self._stumble(live)
        else:
            live.is_submitted = True

    async def _prepare(self, live: LiveRequest, parsed: GenerateRequest | WireError) -> Admitted | None:
        try:
            if isinstance(parsed, WireError):
                live.dead_letter = dead_letter(live, parsed.code, parsed.message, self._config)
                self._refuse(live, parsed.code, parsed.message)
                return None
            return await self._restore(live, parsed)
        except RequestError as error:
            self._refuse(live, error.code, str(error))
        except JournalError as error:
            live.log.warning("reply_unreadable", error=str(error))
            self._refuse(live, "reply_unreadable", str(error))
        except exceptions.RedisError:
            self._table.remove(live)
            raise
        except Exception:
            self._stumble(live)
        return None

    async def _restore(self, live: LiveRequest, request: GenerateRequest) -> Admitted | None:
        check_limits(request, self._config)
        journal = Journal.empty(request.n)
        if live.claim.has_journal:
            async with self._reads:
                journal = await read_journal(self._redis, live.reply_key, n=request.n)
        live.resume(journal.choices())
        if request.timeout_s is not None:
            live.deadline_s = live.clock.monotonic_at(live.enqueued_ms + request.timeout_s * 1000)
        if self._ends_unrun(live, journal):
            return None
        tokens = await self._encode(request, live.fields)
        live.prompt_tokens = len(tokens)
        if live.outcome is not None:  # only the end is missing
            self._publisher.end(live, live.outcome)
            return None
        live.is_admitted = True
        return Admitted(live, to_engine_request(request, tokens, self._defaults, journal.generated))

    async def _encode(self, request: GenerateRequest, fields: Fields) -> tuple[int, ...]:
        """A chat always in a thread, and not in one of the prompts': its template may take long and make much text."""

        def encode() -> tuple[int, ...]:
            return encode_prompt(request, self._text, self._config)

        if request.messages is None:
            return await self._apart(fields, encode)
        return await asyncio.get_running_loop().run_in_executor(self._chat_threads, encode)

    def _ends_unrun(self, live: LiveRequest, journal: Journal) -> bool:
        claim = live.claim
        if claim.strikes >= self._config.max_attempts:
            message = f"{claim.strikes} workers in a row died while they had this request and got no further with it"
            live.dead_letter = dead_letter(live, "too_many_crashes", message, self._config)
            self._refuse(live, "too_many_crashes", message)
        elif claim.is_cancelled:
            self._publisher.end(live, "cancelled")
        elif live.deadline_s is not None and live.deadline_s <= time.monotonic():
            self._publisher.end(live, "expired")
        return live.end is not None

    def _stumble(self, live: LiveRequest) -> None:
        """Ends a request that raised what nobody expects; called where it is handled."""
        live.log.exception("admission_failed")
        self._refuse(live, "internal_error", "the worker failed to prepare the request; its log says why")

    def _refuse(self, live: LiveRequest, code: str, message: str) -> None:
        live.error = (code, message)
        self._publisher.end(live, "error")

    async def _claim(self, request_id: str, entry_id: str, fields: Fields) -> Claim | None:
        try:
            answer = await self._try_claim(request_id, entry_id)
            if isinstance(answer, NotClaimed) and answer.reason == "duplicate" and await self._is_gone(answer):
                answer = await self._try_claim(request_id, entry_id, gone_entry=answer.other_entry)
        except exceptions.RedisError as error:
            if faults.is_final(error):
                raise RedisRefused(f"Redis refuses what a worker must do: {error}") from error
            if faults.is_passing(error):
                raise
            self._give_up(request_id, entry_id, fields, f"the request's keys can't be written: {error}")
            return None
        if isinstance(answer, Claim):
            return answer
        if answer.reason == "unwritable":
            self._give_up(request_id, entry_id, fields, "the reply holds an entry id that nothing can be written after")
        elif answer.reason == "dead":  # its worker died between the end and the dead letter
            message = "given up by an earlier worker; the end of the reply says why"
            self._publisher.bury(dead_letter_of(request_id, entry_id, fields, "given_up", message, self._config))
        else:
            self._metrics.duplicates.inc(answer.reason == "duplicate")
            self._publisher.acknowledge(entry_id)
        return None

    def _give_up(self, request_id: str, entry_id: str, fields: Fields, message: str) -> None:
        """A request that can't be claimed: its keys hold what no worker writes there."""
        self._publisher.tell(unclaimed_end(request_id, message, self._config))
        self._publisher.bury(dead_letter_of(request_id, entry_id, fields, "reply_unwritable", message, self._config))

    async def _try_claim(self, request_id: str, entry_id: str, gone_entry: str = "") -> Claim | NotClaimed:
        command = scripts.claim(
            self._config.queue,
            request_id,
            entry_id=entry_id,
            worker=self._config.name,
            instance=self._instance,
            ttl_ms=round(self._config.reply_ttl_s * 1000),
            gone_entry=gone_entry,
        )
        return scripts.parse_claim(await self._batcher.execute(*command), self._instance)

    async def _is_gone(self, other: NotClaimed) -> bool:
        """Whether the entry that the request was first claimed with was deleted by somebody, with no end written."""
        entry = other.other_entry
        return not await self._redis.xrange(keys.requests(self._config.queue), min=entry, max=entry)

    async def _apart(self, fields: Fields, function: Callable[[], _T]) -> _T:
        """What `function` makes of a queue entry; in a thread, unless the entry is small."""
        if sum(map(len, fields.values())) <= SMALL_BYTES:
            return function()
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)


def _parse(entry: QueueEntry, max_body_bytes: int) -> GenerateRequest | WireError:
    try:
        return parse_request(entry.id, entry.fields, max_body_bytes=max_body_bytes, size=entry.size)
    except WireError as error:
        return error
