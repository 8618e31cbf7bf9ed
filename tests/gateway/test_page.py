"""The page at `/`: how it is served, what it holds, and its functions, which node runs here."""

from __future__ import annotations

import json
import random
import re
import shlex
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import httpx2
import pytest

from penstock.gateway.page.routes import PATHS
from penstock.protocol.redis.connection import RedisClient
from tests.gateway.openai.openai_clients import two_words
from tests.support.patience import WAIT_S
from tests.support.programs.fakes import ScriptedWorker
from tests.support.programs.gateway_harness import announce, new_key, running_gateway

HERE = Path(__file__).parent
STATIC = HERE.parents[1] / "gateway" / "page" / "static"
FORM = {"model": "tiny", "system": "", "temperature": "", "top_p": "", "max_tokens": "", "seed": "", "more": ""}

needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")


@asynccontextmanager
async def browsing(redis_url: str, **settings: Any) -> AsyncIterator[httpx2.AsyncClient]:
    async with (
        running_gateway(redis_url, **settings) as gateway,
        httpx2.AsyncClient(base_url=gateway.url, timeout=WAIT_S) as http,
    ):
        yield http


async def test_the_page_and_its_files_are_there_for_everybody(redis_url: str) -> None:
    await new_key(redis_url)
    async with browsing(redis_url) as http:
        for path in PATHS:
            response = await http.get(path)
            assert response.status_code == 200
            kind = {"css": "text/css", "mjs": "text/javascript"}.get(path.rpartition(".")[2], "text/html")
            assert response.headers["content-type"] == f"{kind}; charset=utf-8"
            assert response.headers["x-content-type-options"] == "nosniff"
            policy = dict(part.strip().split(" ", 1) for part in response.headers["content-security-policy"].split(";"))
            assert policy.pop("img-src") == "data:"
            assert {name for name, sources in policy.items() if sources == "'self'"} == {
                "script-src", "style-src", "connect-src",
            }  # fmt: skip
            assert all(sources in ("'none'", "'self'") for sources in policy.values())
            assert policy["default-src"] == policy["frame-ancestors"] == "'none'"
        assert (await http.head("/")).status_code == 200
        assert (await http.get("/v1/models")).status_code == 401


async def test_it_can_be_left_out(redis_url: str) -> None:
    async with browsing(redis_url, page=False) as http:
        assert {(await http.get(path)).status_code for path in PATHS} == {404}


def test_every_file_is_served_and_none_refers_to_anything_else() -> None:
    linked = {"/"}
    for file in STATIC.iterdir():
        text = file.read_text()
        assert text.isascii()
        assert re.findall(r"(?:https?:|wss?:)?//\w\S*", text) == []
        assert not re.search(r"\bimport\(|(?:inner|outer|Adjacent)HTML|document\.write|eval\(|url\(|@import", text)
        assert (
            file.name == "chat.mjs" or "localStorage" not in text
        )  # a key is kept as long as the tab, chats for longer
        linked |= {urljoin("/operations", link) for link in re.findall(r'(?:href|src)="(?!data:)(.*?)"', text)}
        linked |= {f"/page/{link}" for link in re.findall(r'from "\./(.*?)"', text)}
    assert linked - {"/docs"} == PATHS - {"/page/docs.css"}  # that page is made, and links to its style itself
    assert len(PATHS) == len(list(STATIC.iterdir()))


@pytest.mark.parametrize("name", ["index.html", "operations.html"])
def test_no_script_or_style_is_inline(name: str) -> None:
    html = (STATIC / name).read_text()
    assert re.findall(r"<script[^>]*>(.*?)</script>", html, re.DOTALL) == [""]
    assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:", html)


def test_what_the_script_looks_for_is_in_the_page() -> None:
    html, script = ((STATIC / name).read_text() for name in ("index.html", "chat.mjs"))
    fields = json.loads(re.findall(r"const FIELDS = (\[.*?\])", script)[0])
    assert set(fields) == set(FORM)
    sought = {*re.findall(r'\bat\("(\w+)"\)', script), *fields}
    ids = re.findall(r'\bid="(\w+)"', html)
    assert sought <= set(ids)
    assert len(ids) == len(set(ids))


def test_what_the_script_of_operators_looks_for_is_in_their_page() -> None:
    html, script, tables = ((STATIC / name).read_text() for name in ("operations.html", "operations.mjs", "tables.mjs"))
    shown = re.findall(r"return \{ (.*?) \};", tables)[0]
    sought = {*re.findall(r'\bat\("(\w+)"\)', script), *re.findall(r"(\w+): \w+Of", shown)}
    ids = re.findall(r'\bid="(\w+)"', html)
    assert {"workers", "lanes", "requests", "letters"} < sought <= set(ids)
    assert len(ids) == len(set(ids))


def test_a_key_travels_in_a_header_alone() -> None:
    for name in ("chat.mjs", "operations.mjs"):
        script = (STATIC / name).read_text()
        assert "document.cookie" not in script
        assert not re.search(r"[?&]key=|searchParams", script)
    assert 'credentials: "omit"' in script


def in_node(*calls: Any) -> list[Any]:
    """Runs functions of the page; calls are `[name, ...arguments]`, and results come in their order."""
    given = "".join(json.dumps(call) + "\n" for call in calls)
    command = ["node", str(HERE / "page_functions.mjs")]
    result = subprocess.run(command, input=given, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.split("\n") if line]


@needs_node
def test_how_far_a_long_prompt_is_stands_before_its_length() -> None:
    each = {
        "id": "r",
        "worker": "w",
        "phase": "running",
        "age_s": 1,
        "running_s": 1,
        "prompt_tokens": 6800,
        "tokens": 0,
    }
    running = [{**each, "takeovers": 0, "prefilled": prefilled} for prefilled in (2048, 0)]
    [tables] = in_node(["tablesOf", {"workers": [], "lanes": [], "letters": [], "running": running}])
    assert [row["cells"][6] for row in tables["requests"]["rows"]] == ["2,048/6,800", "6,800"]


@needs_node
def test_events_are_read_wherever_the_stream_is_cut() -> None:
    stream = (
        ': ping\n\nid: 1-1.0\nevent: x\ndata: {"a":1}\n\ndata:b\r\ndata: c\r\n\r\ndata\rdata:  d\r\r\ndata: cut off'
    )
    expected = ['{"a":1}', "b\nc", "\n d"]
    sizes = range(1, len(stream))
    pieces = [[stream[place : place + size] for place in range(0, len(stream), size)] for size in sizes]
    assert in_node(*(["events", each] for each in pieces)) == [expected] * len(pieces)
    comments = [": pre", "fill 2048/6800\n\n: prefill x/1\n\ndata: : prefill 1/1\n\n: prefill 6800/6800\n\n"]
    assert in_node(["prefills", comments]) == [[[2048, 6800], [6800, 6800]]]


@needs_node
def test_a_request_has_what_is_in_the_form() -> None:
    question = [{"role": "user", "content": "hello"}]
    full = FORM | {"system": "Be brief.", "temperature": "0.5", "max_tokens": " 7 ", "more": '{"top_k": 2}'}
    plain = {"model": "tiny", "messages": question, "stream": True, "stream_options": {"include_usage": True}}
    wrong = [FORM | {"more": more} for more in ("[]", "{", "null", '{"stream": false}')]
    wrong.append(FORM | {"seed": "a"})
    first, second, *errors = in_node(*(["requestOf", form, question] for form in (FORM, full, *wrong)))
    assert first == plain
    system = {"role": "system", "content": "Be brief."}
    assert second == {**plain, "messages": [system, *question], "temperature": 0.5, "max_tokens": 7, "top_k": 2}
    assert all(list(error) == ["error"] for error in errors)


@needs_node
def test_the_command_is_the_same_request() -> None:
    body = {"messages": [{"role": "user", "content": 'it\'s $HOME\n"quoted" \\ `id`'}]}
    with_key, without = in_node(["curlOf", "http://a/b", body, True], ["curlOf", "http://a/b", body, False])
    words = shlex.split(without)
    assert words[:3] == ["curl", "--no-buffer", "http://a/b"]
    assert json.loads(words[-1]) == body
    assert "$PENSTOCK_API_KEY" in with_key
    assert "$PENSTOCK_API_KEY" not in without


@needs_node
async def test_what_a_gateway_streams_becomes_an_answer(redis: RedisClient, redis_url: str) -> None:
    await announce(redis)
    async with browsing(redis_url) as http, ScriptedWorker(redis_url, two_words):
        (body,) = in_node(["requestOf", FORM, [{"role": "user", "content": "hello"}]])
        stream = (await http.post("/v1/chat/completions", json=body)).text
    (events,) = in_node(["events", [stream]])
    (answer,) = in_node(["answer", events])
    assert answer["message"] == {"role": "assistant", "content": "two words"}
    assert (answer["end"], answer["isWhole"], answer["usage"]["completion_tokens"]) == ("stop", True, 9)
    (speed,) = in_node(["speedOf", answer, 1000, 1100, 1500])
    assert speed == "9 tokens, first token after 100 ms, 20.0 tokens/s, stop"


@needs_node
def test_reasoning_calls_and_errors_are_told_apart() -> None:
    def delta(**fields: Any) -> str:
        return json.dumps({"choices": [{"index": 0, "delta": fields, "finish_reason": None}]})

    def call(arguments: str, **first: str) -> dict[str, Any]:
        name = {"name": first.pop("name")} if first else {}
        return {"index": 0, **first, "function": {**name, "arguments": arguments}}

    parts = [
        delta(reasoning="so", reasoning_content="so"),
        delta(content="hm", tool_calls=[call('{"a"', id="call_1", name="f")]),
        delta(tool_calls=[call(": 1}")]),
        json.dumps({"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]}),
    ]
    answer, failed, nothing = in_node(
        ["answer", parts], ["answer", ['{"error": {"message": "out of luck"}}']], ["answer", []]
    )
    spelled = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    assert answer["message"] == {"role": "assistant", "content": "hm", "reasoning": "so", "tool_calls": [spelled]}
    assert failed == {"error": "out of luck"}
    assert (nothing["message"], nothing["isWhole"]) == (None, False)


@needs_node
def test_markdown_becomes_elements() -> None:
    cases = {
        "one\ntwo\n\nthree": [["p", "", "one\ntwo"], ["p", "", "three"]],
        "# a *b*\n### c": [["h2", "", "a ", ["em", "", "b"]], ["h4", "", "c"]],
        "**a** __b__ ***c*** _d_ `**e**`": [
            ["p", "", ["strong", "", "a"], " ", ["strong", "", "b"], " ", ["em", "", ["strong", "", "c"]], " ",
             ["em", "", "d"], " ", ["code", "", "**e**"]],
        ],
        "snake_case_name 2 * 3 * 4 **open": [["p", "", "snake_case_name 2 * 3 * 4 **open"]],
        "- a\n  - b\n- c": [
            ["ul", "", ["li", "", ["p", "", "a"], ["ul", "", ["li", "", ["p", "", "b"]]]], ["li", "", ["p", "", "c"]]],
        ],
        "3. a\n\n   b\n\n4) c": [["ol", "", ["li", "", ["p", "", "a"], ["p", "", "b"]], ["li", "", ["p", "", "c"]]]],
        "It was in\n1984. Then": [["p", "", "It was in\n1984. Then"]],
        "see [the *page*](https://a.example/x_(y)), https://b.example/c_d.": [
            ["p", "", "see ", ["a", "https://a.example/x_(y)", "the ", ["em", "", "page"]], ", ",
             ["a", "https://b.example/c_d", "https://b.example/c_d"], "."],
        ],
        "a\n---\nb \\* c": [["p", "", "a"], ["hr", ""], ["p", "", "b * c"]],
    }  # fmt: skip
    assert in_node(*(["shown", [text]] for text in cases)) == list(cases.values())


@needs_node
def test_code_is_shown_as_it_is_and_can_be_copied() -> None:
    def block(language: str, code: str) -> list[Any]:
        header = ["header", "", ["span", "", language], ["button", "", "Copy"]]
        return ["figure", "code", header, ["pre", "", ["code", "", code]]]

    whole, unclosed, nested = in_node(
        ["shown", ["```py\n<b>*x*</b>\n\n  y\n```\nz"]],
        ["shown", ["~~~\n", "```\na"]],
        ["shown", ["1. do\n   ```\n   - x\n   ```\n2. z"]],
    )
    assert whole == [block("py", "<b>*x*</b>\n\n  y"), ["p", "", "z"]]
    assert unclosed == [block("", "```\na")]
    assert nested == [["ol", "", ["li", "", ["p", "", "do"], block("", "- x")], ["li", "", ["p", "", "z"]]]]


SAFE = {
    "a", "button", "code", "em", "figure", "h2", "h3", "h4", "h5", "h6", "header", "hr", "li", "ol", "p", "pre", "span",
    "strong", "ul",
}  # fmt: skip
PIECES = [
    "<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "[x](javascript:alert(1))", "[x](data:text/html,1)",
    "![i](//e.example)", "[a](HTTPS://e.example)", "](", "[", "*", "**", "_", "`", "```", "\n", "\n\n", "- ", "1. ",
    "# ", "  ", "\\", "http://", "\u2028", "word",
]  # fmt: skip


@needs_node
def test_whatever_a_model_writes_is_text_and_links_to_the_web() -> None:
    chosen = random.Random(0)
    texts = [PIECES, *(chosen.choices(PIECES, k=12) for _ in range(300))]
    whole, grown = (in_node(*(["shown", each] for each in given)) for given in ([["".join(t)] for t in texts], texts))
    assert whole == grown  # however it comes in pieces

    def check(node: Any) -> str:
        if isinstance(node, str):
            return node
        tag, attribute, *children = node
        assert tag in SAFE
        assert tag != "a" or attribute.startswith(("http://", "https://"))
        return "".join(map(check, children))

    for pieces, nodes in zip(texts, whole, strict=True):
        shown = "".join(map(check, nodes))
        if not {"`", "```"} & set(pieces):
            assert [shown.count(piece) for piece in PIECES[:2]] == [pieces.count(piece) for piece in PIECES[:2]]


@needs_node
def test_markdown_takes_time_by_its_length_alone() -> None:
    patterns = [
        "[", "](", "![a](b ", "*a ", "**a *b ", "_", "`a``b", "- ", "1. \n", " \n", "\\", "https://a)",
        '[a](https://b "', "#", "~", "``` ", "- - a\n", "> ", "* a\n\n", "[a](https://b)", "h", "[*a](https://b", "\t",
    ]  # fmt: skip
    assert all(isinstance(count, int) for count in in_node(*(["numBlocks", pattern, 200_000] for pattern in patterns)))


@needs_node
def test_chats_are_kept_last_first_within_the_space_there_is() -> None:
    def chat(name: str, **fields: Any) -> dict[str, Any]:
        return {"id": name, "model": "tiny", "system": "", "messages": [{"role": "user", "content": name}], **fields}

    names = [str(number) for number in range(60)]
    chats = [chat(name) for name in names]
    junk = json.dumps(
        [chat("good"), {}, None, chat("bad", messages=[{"role": "tool", "content": 1}]), chat("none", messages=[])]
    )
    many, again, full, nowhere, damaged, unread, title = in_node(
        ["kept", chats, 100_000],
        ["kept", [*chats[:2], chats[0]], 100_000],
        ["kept", chats[:4], 250],
        ["kept", chats[:2], None],
        ["kept", [], 1000, junk],
        ["kept", chats[:1], 1000, "{"],
        ["titleOf", chat("", messages=[{"role": "user", "content": " a\nb"}])],
    )
    assert many == {"done": [True] * 60, "left": names[:9:-1], "cleared": []}
    assert again["left"] == ["0", "1"]
    assert (full["done"], full["left"]) == ([True] * 4, ["3", "2"][: len(full["left"])])
    assert nowhere == {"done": [False, False], "left": ["1", "0"], "cleared": []}
    assert (damaged["left"], unread["left"], title) == (["good"], ["0"], "a")


@needs_node
async def test_what_is_missing_is_said_at_its_field(redis: RedisClient, redis_url: str) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
    async with browsing(redis_url) as http:
        nobody = await http.post("/v1/chat/completions", json=body)
    await announce(redis)
    async with browsing(redis_url) as http:
        wrong = await http.post("/v1/chat/completions", json=body | {"temperature": "warm"})
        other = await http.post("/v1/chat/completions", json=body | {"model": "other"})
        role = await http.post("/v1/chat/completions", json=body | {"messages": [{"role": "x", "content": ""}]})
        await new_key(redis_url)
    async with browsing(redis_url) as http:
        keyless = await http.post("/v1/chat/completions", json=body)
        headers = {"authorization": "Bearer wrong"}
        unknown = await http.post("/v1/chat/completions", json=body, headers=headers)
    answers = [nobody, wrong, other, role, keyless]
    said = in_node(
        *(["failureOf", each.status_code, each.text, False] for each in answers),
        ["failureOf", unknown.status_code, unknown.text, True],
        ["failureOf", 502, "<html>", False],
    )
    assert [each.get("field") for each in said] == ["model", "temperature", "model", None, "key", "key", None]
    assert "No worker" in said[0]["message"]
    assert "penstock keys create" in said[4]["message"]
    assert said[6]["message"] == "502 <html>"


@needs_node
def test_a_question_without_an_answer_is_asked_again_or_left_out() -> None:
    first, answer, second = ({"role": role, "content": role} for role in ("user", "assistant", "user"))
    whole, open_ = [first, {**answer, "note": "9 tokens"}], [first, answer, second]
    sent, *parts = in_node(
        ["requestOf", FORM, whole], ["answeredOf", whole], ["answeredOf", open_], ["askedOf", whole], ["askedOf", open_]
    )
    assert sent["messages"] == [first, answer]
    assert parts == [whole, [first, answer], [first], open_]


def test_an_id_that_both_pages_have_is_the_same_kind_of_element() -> None:
    """One style sheet serves both: a style by an id is meant for one kind of element."""
    kinds: dict[str, set[str]] = {}
    for page in ("index.html", "operations.html"):
        for kind, name in re.findall(r'<(\w+)[^>]*\bid="([\w-]+)"', (STATIC / page).read_text()):
            kinds.setdefault(name, set()).add(kind)
    assert {name: found for name, found in kinds.items() if len(found) > 1} == {}
