"""Runs a job: sends the rows that have no reply yet, and writes what comes back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast

from penstock.producer import AsyncClient, BulkResult, ConnectionLost, ProgressCallback, RowIds, ServerRefused
from penstock.producer.request import build_request, check_options
from penstock.producer.row_ids import OF_THE_DELIVERY
from penstock.protocol.wire import ModelCard, Sampling
from penstock.tools.map.errors import MapError
from penstock.tools.map.files import check_output, open_results, open_rows
from penstock.tools.map.job import JobFile
from penstock.tools.map.pending import UNNAMED, PendingRows
from penstock.tools.map.prompts import PromptSource
from penstock.tools.map.results import ID, AppendedFile, JsonLinesFile, as_columns, as_failure
from penstock.tools.map.rows import Row, Rows

CHAT = [{"role": "user", "content": "x"}]
"""A prompt that allows every option."""

_PROMPT_FIELDS = frozenset({"messages", "prompt", "prompt_token_ids"})


@dataclass(frozen=True, slots=True)
class MapOptions:
    """What a job reads, writes and asks for. `failures` is beside the output if it is None."""

    input: Path
    output: Path
    failures: Path | None
    source: PromptSource
    sampling: Mapping[str, Any]
    in_flight: int
    is_ordered: bool
    retries_failed: bool


@dataclass(slots=True)
class Counts:
    """Rows and tokens. `done` and `failed_before` are the rows that earlier runs have ended."""

    done: int = 0
    failed_before: int = 0
    answered: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True, slots=True)
class MapJob:
    """A job whose options and input can be used.

    Attributes:
        options: as they were given.
        rows: the input, of `total` rows.
        sampling: the options of all requests.
    """

    options: MapOptions
    rows: Rows
    total: int
    sampling: Sampling

    @classmethod
    def of(cls, options: MapOptions) -> Self:
        """Makes a job, after checking everything that can be checked without Redis.

        Raises:
            MapError: an option or a file can't be used.
            RequestRefused: an option of the requests is unknown or out of range.
        """
        options.source.check()
        sampling = cast("Sampling", dict(options.sampling))
        check_options(sampling)
        with _named("INPUT"):
            rows = open_rows(options.input)
            total = rows.count()
        with _named("OUTPUT"):
            check_output(options.output, rows)
        return cls(options, rows, total, sampling)

    @property
    def failures(self) -> Path:
        """Where rows go that failed."""
        output = self.options.output
        return self.options.failures or output.with_name(f"{output.name}.failures.jsonl")

    async def run(self, client: AsyncClient, report: ProgressCallback) -> Counts:
        """Runs it to its end, from where an earlier run stopped.

        Raises:
            MapError: a file can't be used, or the job was begun with other options.
            ConnectionLost, ServerRefused: Redis is away, or refuses for good; a later run continues.
        """
        options = self.options
        card = await client.model_card()
        with JobFile(options.output) as file:
            model = _model(card, file)
            asked = {"model": model, **self._asked()}
            if file.is_new:
                file.begin(asked)
            else:
                file.check_same(asked)
            with open_results(options.output, self.rows) as results, JsonLinesFile(self.failures) as failures:
                a_run = _Run(options, results, failures)
                pending = a_run.pending(self.rows, self.total, self.sampling, RowIds(file.key, model=model))
                return await a_run.run(client, pending, report)

    def _asked(self) -> dict[str, Any]:
        """Returns what every row is asked for, in a form that JSON keeps."""
        source, request = self.options.source, build_request(CHAT, self.sampling, fresh_id=UNNAMED)
        fixed = request.model_dump(mode="json", exclude_unset=True, exclude=set(OF_THE_DELIVERY | _PROMPT_FIELDS))
        prompts = {"column": source.column, "template": source.template, "system": source.system, "plain": source.plain}
        return {**prompts, **fixed}


@contextmanager
def _named(argument: str) -> Iterator[None]:
    try:
        yield
    except MapError as error:
        raise MapError(f"{argument}: {error}") from error


def _model(card: ModelCard | None, file: JobFile) -> str:
    """Returns which model the rows are for, by its weights, or else its name; the job's own while nobody serves the
    queue, or if nobody did when it was begun.
    """
    known = str(file.asked.get("model", ""))
    if card is None or not (file.is_new or known):
        return known
    return card.weights or card.model


class _Run:
    """One run of a job: its files, and what was counted."""

    def __init__(self, options: MapOptions, results: AppendedFile, failures: JsonLinesFile) -> None:
        self._options = options
        self._results = results
        self._failures = failures
        self._counts = Counts()
        self._no_longer_failed: set[str] = set()  # ids of rows

    def pending(self, rows: Rows, total: int, sampling: Sampling, ids: RowIds) -> PendingRows:
        """Returns the rows that have to be sent, going by what the files hold."""
        done = {str(record.get(ID)) for record in self._results.records()}
        failed = {str(each.get(ID)): str(each.get("request_id")) for each in self._failures.records()}
        self._no_longer_failed = failed.keys() & done
        failed = {row_id: tried for row_id, tried in failed.items() if row_id not in done}
        retries = self._options.retries_failed
        return PendingRows(
            rows=rows,
            total=total,
            source=self._options.source,
            sampling=sampling,
            ids=ids,
            done=done,
            failed=failed if retries else {},
            passed_over=set() if retries else set(failed),
            refuse=self._refuse,
        )

    async def run(self, client: AsyncClient, pending: PendingRows, report: ProgressCallback) -> Counts:
        replies = client.map(
            pending,
            max_in_flight=self._options.in_flight,
            ordered=self._options.is_ordered,
            progress=report,
            ids=pending.ids,
        )
        try:
            async with aclosing(replies):
                async for result in replies:
                    row, row_id = pending.take(result.index)
                    if self._write(result, row, row_id) and row_id in pending.failed:
                        self._no_longer_failed.add(row_id)
        finally:
            self._results.sync()
            self._failures.sync()
        if self._options.retries_failed or self._no_longer_failed:
            self._failures.keep_last(lambda record: record.get(ID) not in self._no_longer_failed)
        self._counts.done, self._counts.failed_before = pending.num_done, pending.num_passed_over
        return self._counts

    def _write(self, result: BulkResult, row: Row, row_id: str) -> bool:
        """Writes a result to its file. Returns whether the row has its reply."""
        reply, counts = result.reply, self._counts
        if isinstance(result.error, ConnectionLost | ServerRefused):  # it is no fault of the row's
            raise result.error
        if reply is None or reply.finish_reason in ("cancelled", "expired"):
            counts.failed += 1
            self._failures.add(as_failure(row.number, row.columns, row_id, result))
            return False
        self._results.add({**row.columns, **as_columns(row.number, row_id, reply)})
        counts.answered += 1
        counts.prompt_tokens += reply.usage.prompt_tokens
        counts.completion_tokens += reply.usage.completion_tokens
        return True

    def _refuse(self, row: Row, row_id: str, why: str) -> None:
        self._counts.failed += 1
        said = {"code": "invalid_request", "message": why}
        self._failures.add({**row.columns, "reply_row": row.number, ID: row_id, "request_id": row_id, **said})
