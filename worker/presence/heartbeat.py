"""The lease that proves that a worker lives, and the takeover of entries from workers that do not."""

from __future__ import annotations

import asyncio
import random
import time

import structlog
from redis import exceptions

from penstock.protocol import keys, scripts
from penstock.protocol.consumers import is_worker
from penstock.protocol.redis.connection import RedisClient
from penstock.protocol.redis.faults import is_no_group
from penstock.protocol.redis.pipeline import Command
from penstock.protocol.tasks import end_tasks
from penstock.protocol.wire import ModelCard
from penstock.serving.readiness import Readiness
from penstock.worker.config import WorkerConfig
from penstock.worker.errors import NameTaken, OtherFleet, WorkerError
from penstock.worker.metrics import WorkerMetrics
from penstock.worker.redis import retries
from penstock.worker.redis.guarded import execute_one
from penstock.worker.tasks import pause

_log = structlog.get_logger(__name__)
_PART = "heartbeat"  # name in readiness

RETIRE_COUNT = 100  # entries moved per script
BEATS_PER_READ = 500  # heartbeats checked per command
BEATS_PER_TTL = 3
AGAIN_S = 1.0  # a worker whose beat or look failed tries again within this time
SETTLES_S = 1.5  # after an outage, all live workers have beaten again within this time
SOONEST, LATEST = 0.75, 1.25  # a worker looks for dead workers again after its interval times a factor in this range


class Heartbeat:
    """A key with a time to live: while it exists, no other worker takes this one's entries. Its value names the
    process.

    If two processes have the same name, the one whose instance is in the key keeps running. The other, which was frozen
    or cut off for longer than the time to live, waits until that key lapses: Redis may have failed over to a replica
    that still has the key of a process that is gone. Once it sees the key renewed, it stops, through `must_drain`.

    The same round trip asks whether somebody wants this process to drain (`penstock drain`), and tells clients whether
    it serves the queue, and with which model. If two processes join an empty queue with different models, the first to
    beat gets the queue. The other waits until the first one's card lapses, and stops if it sees the card renewed. A
    process whose key has lapsed does the same: others may have taken the queue over meanwhile, with another model.
    """

    def __init__(
        self, redis: RedisClient, config: WorkerConfig, instance: str, readiness: Readiness, card: ModelCard
    ) -> None:
        self._redis = redis
        self._card = card.to_fields()
        self._config = config
        self._instance = instance
        self._readiness = readiness
        self._ttl_ms = round(config.heartbeat_ttl_s * 1000)
        self._model_ttl_ms = self._ttl_ms + round(config.model_wait_s * 1000)
        self._interval_s = config.heartbeat_ttl_s / BEATS_PER_TTL
        self._is_serving = False
        self._served_ms = 0  # how long the queue is certainly served
        self._is_announced = False
        self._num_unannounced = 0  # failed announcements in a row
        self._announcing: asyncio.Task[None] | None = None
        self._beat_now = asyncio.Event()
        self._rival: scripts.Rival | None = None
        self.has_announced = asyncio.Event()  # set once clients can find the queue, or announcing it has failed
        self.must_drain = asyncio.Event()
        self.must_end: WorkerError | None = None  # why this process must stop, once another was seen alive

    @property
    def is_contested(self) -> bool:
        """Whether the last beat found another process in the key."""
        return self._rival is not None

    async def start(self, stop: asyncio.Event) -> None:
        """Takes the name, unless `stop` comes first.

        A process of the same name that died keeps it until its heartbeat expires, so this may wait.

        Raises:
            NameTaken: the name's owner lives.
            OtherFleet: the queue's workers serve other tokens.
        """
        while (left_s := await self.beat()) and not stop.is_set():
            if self.must_end is not None:
                raise self.must_end
            await pause(stop, min(left_s, self._interval_s))

    def set_serving(self, is_serving: bool) -> None:
        """Sets whether this worker takes requests from now on. `run` announces it at once."""
        self._is_serving = is_serving
        self._beat_now.set()

    async def run(self) -> None:
        """Beats until cancelled. While Redis is away it keeps trying: the others notice the missing key."""
        backoff, wait_s = retries.Backoff(longest_s=AGAIN_S), self._interval_s
        while True:
            await pause(self._beat_now, wait_s)
            self._beat_now.clear()
            if await retries.survive(self.beat(), _PART, self._readiness):
                backoff.reset()
                wait_s = self._interval_s
            else:
                wait_s = min(self._interval_s, backoff.next_s())

    async def stop(self) -> None:
        """Leaves the group: entries that are still pending here may be taken at once."""
        if self._announcing is not None:
            await end_tasks([self._announcing])
        command = scripts.leave(self._config.queue, worker=self._config.name, instance=self._instance, card=self._card)
        is_unserved = await execute_one(self._redis, command) == 2
        if is_unserved and self._is_announced:
            await self._announce(is_served=False)

    async def beat(self) -> float:
        """Renews the key, or sets it if it has lapsed or was lost with Redis's data.

        Returns:
            0 if this process has the name, else the seconds until the key of the process that has it lapses.
        """
        answer = scripts.parse_beat(await execute_one(self._redis, self._command()))
        if isinstance(answer, scripts.Rival):
            self._look_at(answer)
            return answer.left_s
        self._rival = None
        if answer.drain_mark == self._instance:  # a mark for an earlier process of this name is ignored
            self.must_drain.set()
        self._served_ms = answer.served_ms
        if self._is_serving or (self._is_announced and not answer.served_ms):
            self._announce_soon()
        return 0.0

    def _command(self) -> Command:
        return scripts.beat(
            self._config.queue,
            worker=self._config.name,
            instance=self._instance,
            ttl_ms=self._ttl_ms,
            is_serving=self._is_serving,
            must_match=not self._config.allow_other_fleet,
            card=self._card,
            model_ttl_ms=self._model_ttl_ms,
        )

    def _announce_soon(self) -> None:
        """Announces beside the beat: the list may be on another cluster node, whose trouble must not cost the lease."""
        if self._announcing is None or self._announcing.done():
            self._announcing = asyncio.create_task(self._try_announce(), name="announce")

    async def _try_announce(self) -> None:
        try:
            async with asyncio.timeout(self._interval_s):
                await self._announce(is_served=self._is_serving)
        except (OSError, *retries.REDIS_ERRORS) as error:  # the next beat tries again
            self._num_unannounced += 1
            if self._num_unannounced == 2:  # only if beats succeed: otherwise the trouble shows elsewhere too
                _log.warning("queue_not_announced", queue=self._config.queue, error=repr(error))
        else:
            self._num_unannounced = 0
        if self._is_serving:
            self.has_announced.set()

    async def _announce(self, *, is_served: bool) -> None:
        """Updates the list of all queues. It is not in the queue's slot, and so not part of the beat."""
        self._is_announced = True  # whether it is on the list, or may be
        ttl_ms = self._served_ms if is_served else 0
        await execute_one(self._redis, scripts.announce(self._config.queue, ttl_ms=ttl_ms))
        self._is_announced = is_served

    def _look_at(self, rival: scripts.Rival) -> None:
        known, self._rival = self._rival, rival
        if rival.is_seen_to_live(known) and self.must_end is None:
            self.must_end = self._reason(rival)
            event = "other_fleet" if isinstance(rival, scripts.OtherModel) else "name_taken"
            _log.error(event, worker=self._config.name, queue=self._config.queue, by=rival.instance)
            self.must_drain.set()

    def _reason(self, rival: scripts.Rival) -> WorkerError:
        queue = self._config.queue
        if isinstance(rival, scripts.OtherModel):
            return OtherFleet(queue, rival.instance, rival.field, rival.theirs, rival.own)
        return NameTaken(self._config.name, queue)


class Reclaimer:
    """Makes entries of consumers without a heartbeat wait again, for a takeover. Any worker does it.

    Each request's own state tells whether its worker died with it, when it is claimed again.
    """

    def __init__(self, redis: RedisClient, config: WorkerConfig, metrics: WorkerMetrics, readiness: Readiness) -> None:
        self._redis = redis
        self._config = config
        self._metrics = metrics
        self._readiness = readiness
        self._rest_s = SOONEST * config.reclaim_interval_s  # until somebody should look again
        self._lost_s: float | None = None  # when Redis was first seen to be away, or to refuse (monotonic)

    async def run(self) -> None:
        """Looks around until cancelled.

        The first worker to look in an interval does it for all. So the total cost to the server grows with the number
        of workers, and not with its square.
        """
        interval_s = self._config.reclaim_interval_s
        while True:
            await asyncio.sleep(self._rest_s + random.uniform(0, LATEST - SOONEST) * interval_s)
            self._rest_s = SOONEST * interval_s  # unless the server says otherwise
            look = self._settle() if self._may_all_have_lapsed else self.look(self._rest_s)
            if await retries.survive(look, "reclaimer", self._readiness):
                self._lost_s = None
            else:
                self._rest_s = min(self._rest_s, SOONEST * AGAIN_S)
                self._lost_s = time.monotonic() if self._lost_s is None else self._lost_s

    @property
    def _may_all_have_lapsed(self) -> bool:
        """Whether Redis took no beats for so long that live workers may look dead."""
        lasted_s = 0.0 if self._lost_s is None else time.monotonic() - self._lost_s
        return lasted_s >= self._config.heartbeat_ttl_s / BEATS_PER_TTL

    async def _settle(self) -> None:
        """Checks that Redis takes writes again, and gives live workers the time to beat."""
        await execute_one(self._redis, scripts.look(self._config.queue, worker=self._config.name, rest_ms=1))
        self._rest_s = SETTLES_S

    async def look(self, shortest_s: float) -> None:
        """Scans, unless another worker did less than `shortest_s` ago."""
        rest_ms = max(1, round(1000 * shortest_s))
        command = scripts.look(self._config.queue, worker=self._config.name, rest_ms=rest_ms)
        is_first, left_ms = await execute_one(self._redis, command)
        self._rest_s = left_ms / 1000
        if is_first:
            await self.scan()

    async def scan(self) -> None:
        for stream in (keys.requests(self._config.queue), calls := keys.calls(self._config.queue)):
            consumers = await self._consumers(stream)
            for name in await self._lapsed(consumers):
                await self._retire(stream, name)
            if stream == calls and consumers:
                await execute_one(self._redis, scripts.redate_calls(self._config.queue))

    async def _lapsed(self, consumers: list[str]) -> list[str]:
        """Returns the `consumers` without a heartbeat."""
        others = [name for name in consumers if name not in (self._config.name, *keys.HOLDERS)]
        found = []
        for start in range(0, len(others), BEATS_PER_READ):
            page = others[start : start + BEATS_PER_READ]
            places = await execute_one(self._redis, scripts.lapsed(self._config.queue, page))
            found += [page[place - 1] for place in places]
        return found

    async def _consumers(self, stream: str) -> list[str]:
        try:
            consumers = await self._redis.xinfo_consumers(stream, keys.GROUP)
        except exceptions.ResponseError as error:
            if is_no_group(error):  # its readers make it
                return []
            raise
        return [consumer["name"].decode(errors="surrogateescape") for consumer in consumers]

    async def _retire(self, stream: str, consumer: str) -> None:
        queue = self._config.queue
        freed = 0
        while True:
            command = scripts.retire(queue, stream=stream, consumer=consumer, count=RETIRE_COUNT)
            moved = int(await execute_one(self._redis, command))
            freed += max(0, moved)
            if moved <= 0:
                break
        if stream != keys.requests(queue):
            return
        if moved >= 0 and is_worker(consumer):  # below 0: its heartbeat is back
            self._metrics.lost_workers.inc()
        if freed:
            self._metrics.reclaimed.inc(freed)
            event = "worker_lost" if is_worker(consumer) else "model_lost"
            shown = consumer.encode(errors="surrogateescape").decode(errors="backslashreplace")
            _log.warning(event, lost=shown, entries=freed)
