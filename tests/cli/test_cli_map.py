"""`penstock map`: rows in, rows with replies out, resumed where it stopped."""

from __future__ import annotations

import asyncio
import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.local.embedded import EmbeddedServer
from penstock.tools.map.job import JobFile
from penstock.tools.map.results import COLUMNS
from tests.cli.cli_process import Outcome, command
from tests.support.patience import eventually
from tests.support.programs.fakes import ScriptedReply, ScriptedWorker, echo

CHAT = [{"role": "system", "content": "s"}, {"role": "user", "content": "chat"}]


@pytest.fixture
def redis_url() -> Iterator[str]:
    with EmbeddedServer() as server:
        yield server.url


async def shout(reply: ScriptedReply) -> None:
    """Answers in capitals, but fails over "bad" and is cancelled over "late"."""
    request = reply.request
    text = request.prompt or "|".join(str(each.content) for each in request.messages or ())
    await reply.own()
    for index in range(request.n):
        await reply.chunk(text.upper() + str(index or ""), index=index)
    if "bad" in text:
        await reply.end("error", code="engine_error", message="the engine broke")
    else:
        await reply.end("cancelled" if "late" in text else "stop")


async def run(redis_url: str, *arguments: object) -> Outcome:
    return await asyncio.to_thread(command, "map", *map(str, arguments), PENSTOCK_REDIS_URL=redis_url)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o777


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


async def test_prompts_and_chats_become_rows_with_replies(redis_url: str, tmp_path: Path) -> None:
    source = write(
        tmp_path / "in.jsonl", {"prompt": "one", "key": 7}, "two", CHAT, {"messages": CHAT}, {"prompt": "one"}
    )
    output = tmp_path / "out.jsonl"
    async with ScriptedWorker(redis_url, shout) as worker:
        outcome = await run(redis_url, source, output, "--max-tokens", 5, "--n", 2, "--json", "--keep-s", 90)
    assert (outcome.status, json.loads(outcome.out)["answered"]) == (0, 5)
    rows = lines(output)
    assert [row["reply_text"] for row in rows] == ["ONE", "TWO", "S|CHAT", "S|CHAT", "ONE"]
    assert [row["reply_row"] for row in rows] == [1, 2, 3, 4, 5]
    assert rows[0].items() >= {
        "prompt": "one", "key": 7,
        "reply_finish_reason": "stop", "reply_prompt_tokens": 0, "reply_completion_tokens": 7,
    }.items()  # fmt: skip
    assert [choice["text"] for choice in rows[0]["reply_choices"]] == ["ONE", "ONE1"]
    assert len({row["reply_id"] for row in rows}) == 5
    assert {request.id for request in worker.taken} == {row["reply_id"] for row in rows}
    assert {(request.max_tokens, request.n, request.keep_s) for request in worker.taken} == {(5, 2, 90)}
    assert names_in(tmp_path) == ["in.jsonl", "out.jsonl", "out.jsonl.job"]
    assert mode_of(tmp_path / "out.jsonl.job") == 0o600


async def test_a_csv_keeps_its_columns_and_what_stands_in_quotes(redis_url: str, tmp_path: Path) -> None:
    source, output = tmp_path / "in.csv", tmp_path / "out.csv"
    source.write_text('id,text,lang\n1,"a ""b""\nc",fr\n2,"d, e",de\n', encoding="utf-8-sig")
    template = tmp_path / "template"
    template.write_text("{text} to {lang} {{}}")
    async with ScriptedWorker(redis_url, shout):
        outcome = await run(redis_url, source, output, "--plain", "--template", f"@{template}")
        again = await run(redis_url, source, output, "--plain", "--template", f"@{template}")
    assert (outcome.status, again.status, again.out.split(";")[1]) == (0, 0, " 2 were there before")
    with output.open(newline="") as file:
        first, second = csv.DictReader(file)
    assert list(first) == ["id", "text", "lang", *COLUMNS]
    assert (first["text"], first["reply_text"]) == ('a "b"\nc', 'A "B"\nC TO FR {}')
    assert (second["reply_text"], second["reply_choices"]) == ("D, E TO DE {}", "")


@pytest.mark.parametrize("ending", [".jsonl", ".csv"])
async def test_what_a_kill_cut_off_is_dropped_and_not_generated_again(
    redis_url: str, tmp_path: Path, ending: str
) -> None:
    source, output = tmp_path / f"in{ending}", tmp_path / f"out{ending}"
    texts = ["one", 'two "quoted"\nlines', "three"]
    if ending == ".csv":
        source.write_text("prompt\n" + "".join(f'"{text.replace(chr(34), chr(34) * 2)}"\n' for text in texts))
    else:
        write(source, *texts)
    async with ScriptedWorker(redis_url) as worker:
        assert (await run(redis_url, source, output, "--plain")).status == 0
        whole = output.read_bytes()
        for size in range(0, len(whole), 7):
            output.write_bytes(whole[:size])
            assert (await run(redis_url, source, output, "--plain")).status == 0
            assert output.read_bytes() == whole
        assert len(worker.taken) == 3
        with source.open("a") as file:
            file.write("four\n" if ending == ".csv" else '"four"\n')
        assert (await run(redis_url, source, output, "--plain")).status == 0
        assert [request.prompt for request in worker.taken] == [*texts, "four"]
    assert output.read_bytes().startswith(whole)


async def test_rows_that_fail_are_told_and_sent_again_when_asked(redis_url: str, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "bad", "k": 1}\n\n"late"\nno JSON\n"good"\n{"reply_id": 3, "prompt": "x"}\n5\n')
    output, failures = tmp_path / "out.jsonl", tmp_path / "failed.jsonl"
    arguments = (source, output, "--plain", "--failures", failures)
    async with ScriptedWorker(redis_url, shout) as worker:
        first = await run(redis_url, *arguments)
        again = await run(redis_url, *arguments)
        assert (first.status, again.status, len(worker.taken)) == (1, 1, 3)
        assert "5 rows failed" in first.err
        assert f"5 rows failed: {failures} says why" in again.err
        told = sorted((row["reply_row"], row["code"], row["message"]) for row in lines(failures))
        assert told[:2] == [(1, "engine_error", "the engine broke"), (2, "cancelled", "the request was cancelled")]
        assert [message for _, code, message in told[2:] if code == "invalid_request"] == [
            "line 4 is not JSON: Expecting value: line 1 column 1 (char 0)",
            "column 'reply_id' has a name of the output's columns",
            "line 7 is neither an object nor a prompt",
        ]
        assert (
            next(row for row in lines(failures) if row["reply_row"] == 1).items()
            >= {"k": 1, "reply_text": "BAD"}.items()
        )
        worker.behave = echo
        retried = await run(redis_url, *arguments, "--retry-failed")
        assert (retried.status, len(worker.taken), len(lines(failures))) == (1, 5, 3)
        assert "3 rows failed" in retried.err
    assert sorted(row["reply_text"] for row in lines(output)) == ["GOOD", "bad", "late"]


async def test_a_job_that_nobody_serves_yet_waits_and_one_that_is_asked_for_otherwise_is_refused(
    redis_url: str, tmp_path: Path
) -> None:
    source, output = write(tmp_path / "in.jsonl", "a"), tmp_path / "out.jsonl"
    running = asyncio.create_task(run(redis_url, source, output, "--plain", "--temperature", "0"))
    await eventually((tmp_path / "out.jsonl.job").exists)
    async with ScriptedWorker(redis_url):
        assert (await running).status == 0
        same = await run(redis_url, source, output, "--plain", "--temperature", "0.0", "--priority", "3")
        other = await run(redis_url, source, output, "--plain", "--temperature", "0.5")
    assert same.status == 0
    assert other.status == 1
    assert "temperature was 0.0 when this output was begun, and is 0.5: name another output" in other.err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("none.jsonl", "out.jsonl"), "INPUT: none.jsonl can't be read"),
        (("in.txt", "out.jsonl"), "in.txt: .txt is not one of .jsonl, .ndjson, .csv, .tsv, .parquet"),
        (("in.jsonl", "out.parquet"), "OUTPUT: out.parquet: the columns of CSV and Parquet are"),
        (("in.jsonl", "out.csv"), "the columns of CSV and Parquet are those of the input"),
        (("in.jsonl", "out.jsonl", "--template", "x {"), "--template can't be read"),
        (
            ("in.jsonl", "out.jsonl", "--template", "x {a.b!r}"),
            "--template: a pair of braces holds a column's name and nothing else",
        ),
        (("in.jsonl", "out.jsonl", "--template", "x"), "--template: it names no column"),
        (("in.jsonl", "out.jsonl", "--template", "{x}", "--column", "x"), "not from both"),
        (("in.jsonl", "out.jsonl", "--plain", "--system", "x"), "leave out --plain or --system"),
        (("in.jsonl", "out.jsonl", "--max-tokens", "0"), "max_tokens"),
        (("twice.csv", "out.csv"), "column 'a' is in the header twice"),
        (("empty.csv", "out.csv"), "empty.csv has no header"),
        (("bytes.csv", "out.csv"), "bytes.csv can't be read"),
    ],
)
def test_what_can_t_be_used_is_refused_by_name_before_redis_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "in.jsonl", "a")
    for name, content in {
        "in.txt": b"a\n",
        "twice.csv": b"a,a\n1,2\n",
        "empty.csv": b"",
        "bytes.csv": b"a\n\xff\n",
    }.items():
        (tmp_path / name).write_bytes(content)
    outcome = command("map", *arguments, PENSTOCK_REDIS_URL="redis://127.0.0.1:1")
    assert outcome.status == 2
    assert told in outcome.err
    assert outcome.err.count("\n") == 1
    assert not (tmp_path / "out.jsonl").exists()


async def test_what_is_there_is_not_overwritten_and_one_run_at_a_time_has_a_job(redis_url: str, tmp_path: Path) -> None:
    source, output = write(tmp_path / "in.jsonl", "a"), tmp_path / "out.jsonl"
    over_itself = await run(redis_url, source, source)
    nowhere = await run(redis_url, source, tmp_path / "no/such/out.jsonl")
    with JobFile(output) as file:
        file.begin({})
        second = await run(redis_url, source, output)
    (tmp_path / "out.jsonl.job").write_text("{")
    harmed = await run(redis_url, source, output)
    for outcome, told in (
        (over_itself, "in.jsonl already exists and was not begun by this command: name another output"),
        (nowhere, "out.jsonl.job can't be written"),
        (second, "out.jsonl.job: another run of this job is under way"),
        (harmed, "out.jsonl.job is damaged: name another output"),
    ):
        assert outcome.status == 1
        assert told in outcome.err
    assert names_in(tmp_path) == ["in.jsonl", "out.jsonl.job"]
