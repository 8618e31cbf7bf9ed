"""Turns a claimed request into one that the engine can run, from earlier claims' output and the prompt's tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from penstock.engine.driver import DriverStopped
from penstock.engine.errors import RequestError
from penstock.engine.generation_defaults import GenerationDefaults
from penstock.engine.request import Request
from penstock.protocol.redis.connection import RedisClient
from penstock.protocol.wire import GenerateRequest, WireError
from penstock.worker.config import WorkerConfig
from penstock.worker.intake.admission import check_limits, to_engine_request
from penstock.worker.intake.preparation import Preparer, prepare
from penstock.worker.publish.journal import Journal, JournalError, read_journal
from penstock.worker.publish.outbox import Outbox
from penstock.worker.redis import retries
from penstock.worker.run.requests import LiveRequest, Over
from penstock.worker.threads import Threads

MAX_JOURNAL_READS = 8  # each holds a connection


class Restorer:
    """Prepares claimed requests for the engine, or ends those that need no generation."""

    def __init__(
        self,
        redis: RedisClient,
        config: WorkerConfig,
        threads: Threads,
        preparer: Preparer,
        defaults: GenerationDefaults,
        outbox: Outbox,
    ) -> None:
        self._redis = redis
        self._reads = asyncio.Semaphore(MAX_JOURNAL_READS)
        self._config = config
        self._threads = threads
        self._preparer = preparer
        self._defaults = defaults
        self._outbox = outbox

    async def restore(self, live: LiveRequest) -> Request | None:
        """Returns the request for the engine. None: it needs no generation, and its end is under way.

        Raises:
            RedisError: the server is in trouble; the entry stays pending, to be claimed again.
        """
        request = None
        with suppress(Over), ending_failed(live, self._outbox):
            if isinstance(live.asked, WireError):
                self._outbox.fail(live, live.asked.code, live.asked.message, is_dead=True)
            else:
                request = await self._restore(live, live.asked)
        return request

    async def _restore(self, live: LiveRequest, asked: GenerateRequest) -> Request | None:
        check_limits(asked, self._config)
        journal = await self._read_journal(live, asked.n)
        live.resume(journal.choices(), asked.timeout_s)
        if self._ends_unrun(live):
            return None
        preparation = await prepare(
            self._preparer, self._threads, asked, live.fields, _enqueued_s(live), live.unless_over
        )
        if live.is_gone:  # before this: another owner has it
            return None
        if preparation.history_changes:
            live.log.info("history_changed", **preparation.history_changes)
        live.admit(len(preparation.prompt_token_ids), preparation.ignored)
        if live.outcome is not None:  # only the end is missing
            self._outbox.end(live, live.outcome)
            return None
        return to_engine_request(asked, preparation, self._defaults, journal.generated)

    async def _read_journal(self, live: LiveRequest, n: int) -> Journal:
        if not live.claim.has_journal:
            return Journal.empty(n)
        async with self._reads:
            return await read_journal(self._redis, live.reply.key, n=n)

    def _ends_unrun(self, live: LiveRequest) -> bool:
        claim = live.claim
        if claim.strikes >= self._config.max_attempts:
            message = f"{claim.strikes} workers in a row died while they had this request and got no further with it"
            self._outbox.fail(live, "too_many_crashes", message, is_dead=True)
        elif claim.is_cancelled:
            self._outbox.end(live, "cancelled")
        elif live.is_overdue(time.monotonic()):
            self._outbox.end(live, "expired")
        elif claim.is_of_other_model and live.outcome is None:
            wait_s = self._config.model_wait_s
            message = f"workers with another model began this reply, and none has been there for {wait_s:g} s"
            self._outbox.fail(live, "model_gone", message)
        elif claim.is_of_other_arithmetic and live.outcome is None:
            message = (
                "the request asks for exact, another arithmetic began this reply, and no worker that has it has been "
                f"there for {self._config.model_wait_s:g} s"
            )
            self._outbox.fail(live, "arithmetic_gone", message)
        return live.has_ended


def _enqueued_s(live: LiveRequest) -> float:
    """Returns the enqueue time from the entry's id, so that every worker makes the same prompt."""
    return int(live.entry_id.partition("-")[0]) / 1000


@contextmanager
def ending_failed(live: LiveRequest, outbox: Outbox) -> Iterator[None]:
    """Ends a request that cannot be served, or fails unexpectedly, with an error; others are not affected.

    Raises:
        RedisError, DriverStopped, Over: the request is not to blame.
    """
    try:
        yield
    except RequestError as error:
        outbox.fail(live, error.code, str(error))
    except JournalError as error:
        live.log.warning("reply_unreadable", error=str(error))
        outbox.fail(live, "reply_unreadable", str(error))
    except retries.REDIS_ERRORS:  # its entry is pending and known to nobody
        outbox.requests.remove(live)
        raise
    except (DriverStopped, Over):
        raise
    except Exception:
        live.log.exception("admission_failed")
        outbox.fail(live, "internal_error", "the worker failed to prepare the request; its log says why")
