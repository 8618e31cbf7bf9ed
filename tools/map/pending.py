"""The rows that a run still has to send."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from penstock.producer import GenerateRequest, RequestRefused, RowIds
from penstock.producer.request import build_request
from penstock.protocol.wire import Sampling
from penstock.tools.map.prompts import NoPrompt, PromptSource
from penstock.tools.map.results import COLUMNS
from penstock.tools.map.rows import Row, Rows

UNNAMED = "-"


@dataclass(slots=True)
class PendingRows:
    """Makes requests of rows, and notes which row each result belongs to.

    Attributes:
        rows: the input, of `total` rows.
        source: makes their prompts.
        sampling: the options of all requests.
        ids: names the rows.
        done: the ids of rows that have their reply.
        failed: those of rows that failed, with the ids of their requests. They are sent again, under other ids.
        passed_over: those of rows that failed and are not sent again.
        refuse: called with a row that makes no request, its id, and why.
        num_done: rows found in `done` so far.
        num_passed_over: rows found in `passed_over` so far.
    """

    rows: Rows
    total: int
    source: PromptSource
    sampling: Sampling
    ids: RowIds
    done: set[str]
    failed: Mapping[str, str]
    passed_over: set[str]
    refuse: Callable[[Row, str, str], None]
    num_done: int = 0
    num_passed_over: int = 0
    _num_sent: int = 0
    _sent: dict[int, tuple[Row, str]] = field(default_factory=dict)

    def __len__(self) -> int:
        """Returns how many rows have to be sent, as far as that is known before all of them are read."""
        return max(0, self.total - len(self.done) - len(self.passed_over))

    def __iter__(self) -> Iterator[GenerateRequest]:
        for row in self.rows:
            request = self._request(row)
            row_id = self.ids.of_content(row.content) if isinstance(request, str) else self.ids.of(request)
            if row_id in self.done:
                self.num_done += 1
            elif row_id in self.passed_over:
                self.num_passed_over += 1
            elif isinstance(request, str):
                self.refuse(row, row_id, request)
            else:
                self._sent[self._num_sent] = (row, row_id)
                self._num_sent += 1
                tried = self.failed.get(row_id)
                yield request.model_copy(update={"id": row_id if tried is None else self.ids.after(tried)})

    def take(self, index: int) -> tuple[Row, str]:
        """Returns the row, and its id, that a result belongs to."""
        return self._sent.pop(index)

    def _request(self, row: Row) -> GenerateRequest | str:
        """Returns the row's request, or why it has none."""
        if row.problem is not None:
            return row.problem
        taken = next((name for name in row.columns if name in COLUMNS), None)
        if taken is not None:
            return f"column {taken!r} has a name of the output's columns"
        try:
            return build_request(self.source.prompt(row.columns), self.sampling, fresh_id=UNNAMED)
        except NoPrompt as error:
            return str(error)
        except RequestRefused as error:
            return error.message
