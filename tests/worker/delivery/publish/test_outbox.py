"""The outbox on a server made of lists, which loses answers, refuses writes and gives requests to others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from redis import exceptions

from penstock.engine.request import Output, Prefill, ToolCallDelta
from penstock.protocol import scripts
from penstock.protocol.scripts import Bill
from penstock.worker.publish import outbox
from penstock.worker.publish.outbox import Bury, Drop, Fence, Finished, WriteRefused
from penstock.worker.publish.writes import (
    AsideWrite,
    Burial,
    ChunkWrite,
    FinishWrite,
    RefreshWrite,
    Write,
)
from penstock.worker.run.requests import Phase
from tests.worker.delivery.delivery_lab import (
    FULL,
    INTERVAL_S,
    LOST,
    NOW_S,
    STALE,
    WRONG_TYPE,
    Bench,
    FixedClock,
    Reply,
    said_by_all,
)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_the_first_token_goes_at_once_and_the_next_ones_together(bench: Bench) -> None:
    live = bench.claim("r")
    bench.push(live, 1)
    assert bench.outbox.due_s() == 0.0
    bench.flush()
    for token in (2, 3):
        bench.push(live, token)
    assert bench.outbox.due_s() == NOW_S + INTERVAL_S
    assert bench.flush() == []
    bench.now_s += INTERVAL_S
    (write,) = bench.flush()
    assert isinstance(write, ChunkWrite)
    assert (write.entry_id, write.pending.token_ids) == ("5-2", [2, 3])


def test_readers_are_told_once_a_second_how_far_a_prompt_is_and_no_longer_once_tokens_come(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FixedClock(NOW_S)
    monkeypatch.setattr(outbox, "time", clock)
    live = bench.claim("r", n=2)
    live.choices[0].num_published = 3  # by an earlier claim

    def step(done: int, *, took_s: float, index: int = 0) -> list[Write]:
        clock.now_s = bench.now_s = clock.now_s + took_s
        bench.outbox.push(live, Output("r", index, 0, (), "", prefill=Prefill(done, 90)))
        return bench.flush()

    assert [len(step(done, took_s=0.4)) for done in (10, 20, 30, 40, 50)] == [0, 0, 1, 0, 0]
    assert step(45, took_s=0.4, index=1)  # the choice that is furthest counts
    assert not step(45, took_s=2.0)
    clock.now_s += 2.0
    bench.outbox.push(live, Output("r", 0, 0, (), "", prefill=Prefill(60, 90)))
    bench.push(live, 7, index=1)
    assert [write.pending.token_ids for write in bench.flush() if isinstance(write, ChunkWrite)] == [[7]]
    assert not step(70, took_s=2.0)
    told = [fields for _, fields in bench.server.replies["r"].entries if "prefill_done" in fields]
    assert [(each["prefill_done"], each["prefill_total"]) for each in told] == [("30", "90"), ("50", "90")]
    assert {(each["index"], each["offset"], each["text"], each["tokens"]) for each in told} == {("0", "3", "", "")}
    assert (live.has_output, live.first_token_ms is not None, bench.outbox.num_tokens) == (True, True, 1)


def test_of_one_request_one_flush_is_under_way(bench: Bench) -> None:
    live = bench.claim("r")
    bench.push(live, 1)
    (first,) = bench.collect()
    bench.push(live, 2)
    bench.now_s += 1
    assert bench.collect() == []
    bench.settle(first, b"5-1")
    bench.now_s += 1
    (second,) = bench.collect()
    assert isinstance(second, ChunkWrite)
    assert second.pending.token_ids == [2]


def test_an_end_goes_at_once_with_what_waits(bench: Bench) -> None:
    live = bench.claim("r")
    bench.push(live, 1)
    bench.flush()
    bench.push(live, 2)
    bench.push(live, 3, reason="stop")
    assert bench.outbox.due_s() == 0.0
    (end,) = bench.flush()
    assert isinstance(end, FinishWrite)
    assert bench.server.replies["r"].tokens(0) == ["1", "2", "3"]
    assert live.is_gone
    (removal,) = bench.collect()
    assert isinstance(removal, AsideWrite)
    assert removal.entry_ids == (live.entry_id,)


def test_while_processors_are_short_an_end_waits_for_the_rest_unless_nothing_runs(bench: Bench) -> None:
    bench.pace.is_stretched, bench.pace.interval_s = True, 60.0
    lives = [bench.claim(name) for name in ("a", "b")]
    for live in lives:
        bench.push(live, 1)
    bench.flush()
    bench.push(lives[0], 2, reason="stop")
    assert bench.outbox.due_s() == NOW_S + 60.0
    bench.push(lives[1], 2, reason="stop")
    assert bench.outbox.due_s() is not None
    assert len(bench.flush()) == 2


@pytest.mark.parametrize(("error", "goes_again"), [(LOST, True), (FULL, True), (WRONG_TYPE, False)])
def test_what_redis_does_not_take_now_goes_again_as_it_was(bench: Bench, error: Exception, goes_again: bool) -> None:
    live = bench.claim("r")
    bench.push(live, 1)
    (write,) = bench.flush(lambda _: error)
    bench.outbox.retry_at_s = NOW_S + 1
    if goes_again:
        assert bench.outbox.due_s() == NOW_S + 1
        assert bench.collect() == [write]
    else:
        assert bench.verdicts == [Bury(live, error)]
        (letter,) = bench.collect()
        assert isinstance(letter, Burial)


def test_a_chunk_that_had_arrived_is_absorbed(bench: Bench) -> None:
    live = bench.claim("r")
    bench.push(live, 1)
    bench.flush(lambda write: (bench.server.execute(write), LOST)[1])
    bench.drain()
    assert bench.outbox.num_absorbed == 1
    assert (bench.outbox.num_chunks, bench.outbox.num_tokens) == (1, 1)
    bench.push(live, 2, reason="stop")
    bench.drain()
    assert bench.outbox.num_tokens == 2
    assert live.reply.last_number == 1


def test_an_entry_that_nobody_of_the_protocol_wrote_spoils_the_reply(bench: Bench) -> None:
    live = bench.claim("r")
    bench.server.replies["r"].append("5-1", ("type", "chunk", "index", "0", "offset", "0", "text", "", "tokens", "9"))
    bench.push(live, 1)
    bench.drain()
    (verdict,) = bench.verdicts
    assert isinstance(verdict, Bury)
    assert "5-1" in str(verdict.error)


def fence(reply: Reply) -> None:
    reply.claim(9, "j")


def vanish(reply: Reply) -> None:
    reply.exists = False


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize(("happening", "kind"), [(fence, Fence), (vanish, Drop)])
def test_a_request_that_is_another_s_or_gone_is_let_go_of(
    bench: Bench, happening: Callable[[Reply], None], kind: type, ends: bool
) -> None:
    live = bench.claim("r")
    happening(bench.server.replies["r"])
    bench.push(live, 1, reason="stop" if ends else None)
    bench.drain()
    assert [type(verdict) for verdict in bench.verdicts] == [kind]
    assert bench.aborted == ["r"]
    assert bench.requests.must_recover
    bench.push(live, 2)
    assert bench.outbox.due_s() is None


def test_a_dead_request_becomes_a_letter_after_its_end(bench: Bench) -> None:
    live = bench.claim("r")
    bench.outbox.fail(live, "too_many_crashes", "three", is_dead=True)
    bench.drain()
    assert [letter.request_id for letter in bench.server.letters] == ["r"]
    assert bench.server.replies["r"].status == "dead"
    assert bench.server.pending == set()


def test_a_letter_that_redis_refuses_is_told_and_its_entry_leaves_all_the_same(bench: Bench) -> None:
    live = bench.claim("r")
    bench.outbox.fail(live, "too_many_crashes", "three", is_dead=True)
    bench.flush()
    bench.outbox.news.clear()
    (letter,) = bench.flush(lambda _: WRONG_TYPE)
    assert bench.outbox.news.is_set()
    assert bench.verdicts[1:] == [WriteRefused(letter, WRONG_TYPE)]  # type: ignore[arg-type]
    bench.drain()
    assert bench.server.pending == set()
    assert bench.server.letters == []


def test_a_reply_s_time_to_live_is_renewed_while_it_is_written() -> None:
    bench = Bench(reply_ttl_s=100.0)
    live = bench.claim("r")
    bench.push(live, 1)
    assert not any(isinstance(write, RefreshWrite) for write in bench.flush())
    bench.now_s += 51
    bench.push(live, 2)
    assert [write.command for write in bench.flush() if isinstance(write, RefreshWrite)] == [
        ("PEXPIRE", "penstock:q:{r}:reply", 100_000),
        ("PEXPIRE", "penstock:q:{r}:state", 100_000),
    ]
    bench.now_s += 1
    bench.push(live, 3)
    assert not any(isinstance(write, RefreshWrite) for write in bench.flush())  # it was, a moment ago


@pytest.mark.parametrize("is_lost", [False, True])
def test_in_a_cluster_an_entry_leaves_when_its_end_was_seen_again(is_lost: bool) -> None:
    bench = Bench(has_nodes=True)
    live = bench.claim("r")
    bench.push(live, 1, reason="stop")
    bench.flush()
    bench.requests.must_recover = False
    if is_lost:
        bench.server.replies["r"].entries.pop()
    bench.drain()
    assert bench.requests.must_recover == is_lost
    assert bench.server.pending == ({live.entry_id} if is_lost else set())


def test_tokens_that_are_put_back_stay_before_those_that_came_since(bench: Bench) -> None:
    """Only the second chunk of a flush was executed, and no answer came."""
    live = bench.claim("r", n=2)
    for index in (0, 1):
        bench.push(live, index, index=index)
    first, second = bench.collect()
    bench.server.execute(second)
    for write in (first, second):
        bench.settle(write, LOST)
    bench.push(live, 7, index=0)
    bench.drain()
    assert bench.server.replies["r"].tokens(0) == ["0", "7"]
    assert bench.server.replies["r"].tokens(1) == ["1"]


def test_that_one_of_several_choices_has_ended_is_told_once(bench: Bench) -> None:
    live = bench.claim("r", n=2)
    bench.push(live, 1, index=0, reason="stop")
    bench.push(live, 2, index=1)
    bench.drain()
    chunks = [fields for _, fields in bench.server.replies["r"].entries if fields["type"] == "chunk"]
    assert [(fields["tokens"], fields.get("finish_reason")) for fields in chunks] == [("1", "stop"), ("2", None)]


def test_on_another_server_what_was_let_go_of_and_what_removes_entries_is_void(bench: Bench) -> None:
    kept, lost = bench.claim("kept"), bench.claim("lost")
    for live in (kept, lost):
        bench.push(live, 1)
    bench.outbox.remove(Bill("7-7", "", None))
    batch = bench.collect()
    assert len(batch) == 3
    bench.requests.let_go(lost)
    bench.requests.must_recover = False
    (write,) = bench.outbox.still_valid(batch)
    assert isinstance(write, ChunkWrite)
    assert write.live is kept
    assert bench.requests.must_recover  # the intake finds the entry pending, and the claim tells whether it has ended
    assert bench.outbox.leaving == set()


def test_an_output_that_cannot_be_taken_up_ends_its_request_alone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, other = bench.claim("broken"), bench.claim("other")
    bench.outbox.push(broken, Output("broken", 3, 0, (1,), "a"))  # there is no fourth choice
    bench.push(other, 1)
    assert broken.error is not None
    assert broken.error[0] == "internal_error"
    assert bench.aborted == ["broken"]
    bench.drain()
    assert bench.server.replies["broken"].num_ends == 1
    assert bench.server.replies["other"].tokens(0) == ["1"]


@pytest.mark.parametrize(
    "part",
    [{"tool_calls": (ToolCallDelta(0, "", "id", "\ud83d"),)}, {"reasoning": "\ud83d"}],
    ids=["call", "reasoning"],
)
def test_a_part_of_a_reply_that_cannot_be_written_ends_its_request_alone(bench: Bench, part: Any) -> None:
    broken, other = bench.claim("broken"), bench.claim("other")
    bench.outbox.push(broken, Output("broken", 0, 0, (1,), "", **part))
    bench.push(other, 1)
    bench.drain()
    assert bench.server.replies["broken"].num_ends == 1
    assert bench.server.replies["other"].tokens(0) == ["1"]


def test_what_is_told_goes_with_the_next_flush(bench: Bench) -> None:
    command = scripts.absolve("q", "r", epoch=1)
    bench.outbox.tell(command)
    assert bench.outbox.news.is_set()
    assert [write.command for write in bench.flush()] == [command]
    assert bench.outbox.is_empty


def test_whoever_writes_is_woken_by_what_leaves_the_queue(bench: Bench) -> None:
    bench.outbox.news.clear()
    bench.outbox.remove(Bill("1-1", "", None))
    assert bench.outbox.news.is_set()


def test_what_goes_again_does_not_if_its_request_was_let_go_of(bench: Bench) -> None:
    live, other = bench.claim("r"), bench.claim("s")
    for each in (live, other):
        bench.push(each, 1)
    bench.flush(lambda _: LOST)
    bench.requests.let_go(live)
    (write,) = bench.collect()
    assert isinstance(write, ChunkWrite)
    assert write.live is other
    assert bench.settle(write, STALE) is None
    bench.requests.let_go(other)
    assert bench.collect() == []  # not the look for it either


def test_a_group_that_is_gone_is_no_refusal(bench: Bench) -> None:
    live = bench.claim("r")
    bench.push(live, 1, reason="stop")
    bench.flush()
    bench.flush(lambda _: exceptions.ResponseError("NOGROUP No such key"))
    assert [type(verdict) for verdict in bench.verdicts] == [Finished]
    assert bench.outbox.is_empty


NAMES = ("a", "b", "c")


rarely = st.integers(0, 9).map(lambda value: value == 9)


class OutboxMachine(RuleBasedStateMachine):
    """Whatever happens, readers get what was generated, in order and once, up to the first token of another owner."""

    @initialize(has_nodes=st.booleans(), stretched=st.booleans())
    def begin(self, has_nodes: bool, stretched: bool) -> None:
        self.bench = Bench(has_nodes=has_nodes)
        self.bench.pace.is_stretched = stretched
        self.lives = {name: self.bench.claim(name, n=index + 1) for index, name in enumerate(NAMES)}
        self.generated: dict[str, list[list[str]]] = {name: [[] for _ in range(i + 1)] for i, name in enumerate(NAMES)}
        self.foreign: set[str] = set()
        self.next_token = 1
        self.under_way: list[Write] = []

    @rule(data=st.data())
    def generate(self, data: st.DataObject) -> None:
        """Makes a step of the engine: something for each choice, and now and then an end."""
        for name, live in self.lives.items():
            for choice in live.choices:
                if live.phase < Phase.ENDED and choice.finish_reason is None:
                    self.generated[name][choice.index].append(str(self.next_token))
                    reason = "stop" if data.draw(rarely) else None
                    self.bench.push(live, self.next_token, index=choice.index, reason=reason)
                    self.next_token += 1

    @rule(name=st.sampled_from(NAMES), does_it=rarely)
    def cancel(self, name: str, does_it: bool) -> None:
        if does_it:
            self.bench.outbox.end(self.lives[name], "cancelled")

    @rule(seconds=st.sampled_from([0.001, INTERVAL_S, 5.0]))
    def wait(self, seconds: float) -> None:
        self.bench.now_s += seconds

    @precondition(lambda self: not self.under_way)
    @rule()
    def send(self) -> None:
        self.bench.now_s += INTERVAL_S
        self.under_way = self.bench.collect()

    @precondition(lambda self: self.under_way)
    @rule(executed=st.lists(st.booleans(), max_size=6), are_answers_lost=st.booleans())
    def answer_in_part(self, executed: list[bool], are_answers_lost: bool) -> None:
        """Has the server refuse some of the commands for now, or breaks the connection so that nobody knows which ones
        ran.
        """
        marks = iter(executed)
        batch, self.under_way = self.under_way, []
        answers = [self.bench.server.execute(write) if next(marks, False) else FULL for write in batch]
        for write, answer in zip(batch, answers, strict=True):
            self.bench.settle(write, LOST if are_answers_lost else answer)

    @precondition(lambda self: self.under_way)
    @rule(is_new=st.booleans())
    def answer(self, is_new: bool) -> None:
        """Answers; the connection may turn out to be a new one before anything is sent."""
        batch, self.under_way = self.under_way, []
        for write in self.bench.outbox.still_valid(batch) if is_new else batch:
            self.bench.settle(write, self.bench.server.execute(write))

    @rule(name=st.sampled_from(NAMES), does_it=rarely)
    def lose_to_another(self, name: str, does_it: bool) -> None:
        reply = self.bench.server.replies[name]
        if does_it and reply.status == "running" and name not in self.foreign:
            self.foreign.add(name)
            reply.claim(9, "j")

    @invariant()
    def readers_get_a_prefix(self) -> None:
        for name, live in self.lives.items():
            reply = self.bench.server.replies[name]
            for index in range(len(live.choices)):
                found = reply.tokens(index)
                assert found == self.generated[name][index][: len(found)]
                assert reply.said(index) == said_by_all(found)
            assert reply.num_ends <= 1
            assert [id_ for id_, _ in reply.entries] == sorted({id_ for id_, _ in reply.entries})

    @invariant()
    def no_entry_leaves_before_its_end(self) -> None:
        for name, live in self.lives.items():
            if live.entry_id not in self.bench.server.pending:
                assert self.bench.server.replies[name].num_ends == 1

    @invariant()
    def an_empty_outbox_has_nothing_due(self) -> None:
        assert (self.bench.outbox.due_s() is None) == self.bench.outbox.is_empty

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        if self.under_way:
            self.answer(is_new=False)
        self.bench.drain()
        for name, live in self.lives.items():
            reply = self.bench.server.replies[name]
            if name in self.foreign:
                assert all(id_[0] == 5 or fields["type"] == "own" for id_, fields in reply.entries)
                continue
            assert not live.is_gone or reply.num_ends == 1
            for index in range(len(live.choices)):
                assert reply.tokens(index) == self.generated[name][index]
            ended = live.phase >= Phase.ENDED
            assert reply.num_ends == ended


OutboxMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40)
TestOutbox = OutboxMachine.TestCase
