"""Grammars are compiled once, within limits that hold, for every kind of vocabulary."""

from __future__ import annotations

import json
import re
import resource
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine import InvalidRequest, Request, SamplingParams
from penstock.engine.errors import EngineError
from penstock.engine.sandbox import sandbox as sandbox_module
from penstock.engine.structured import Grammar, GrammarCompiler, GrammarFailed, Matcher, Vocabulary
from penstock.engine.structured import compiler as compiler_module
from penstock.engine.structured.vocabulary import llguidance_tokenizer
from penstock.engine.text.reply import ReplyStreams
from penstock.engine.text.tokenizer import Tokenizer
from penstock.engine.text.vocabulary import vocabulary_of
from tests.engine.tokenizers_for_tests import byte_level, llama2, metaspace, unigram, word_level

SIZE, EOS = 272, 264


def schema(value: Any) -> str:
    return "start: %json " + json.dumps(value)


def compiler_for(tokenizer: Tokenizer, size: int = SIZE, eos: tuple[int, ...] = (EOS,)) -> GrammarCompiler:
    return GrammarCompiler(lambda: vocabulary_of(tokenizer, size, eos))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_level())


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return compiler_for(tokenizer)


def allowed(matcher: Matcher, size: int = SIZE) -> set[int]:
    mask = np.frombuffer(matcher.state.compute_bitmask(), np.uint8)
    return {int(id_) for id_ in np.nonzero(np.unpackbits(mask, bitorder="little"))[0] if id_ < size}


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


# --- what compiles, and how often ---


def test_a_grammar_is_compiled_once_whoever_asks_for_it(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = compiler_for(tokenizer)
    compiler.prepare()
    assert compiler._tools is not None
    asked: list[str] = []
    ask = compiler._tools._sandbox.ask

    def noted(source: str) -> Any:
        asked.append(source)
        return ask(source)

    monkeypatch.setattr(compiler._tools._sandbox, "ask", noted)
    with ThreadPoolExecutor(8) as threads:
        grammars = list(threads.map(compiler.compile, ['start: "a"'] * 16))
        refusals = [threads.submit(compiler.compile, "start: foo") for _ in range(16)]
    assert len(set(map(id, grammars))) == 1
    assert all('unknown name: "foo"' in str(refusal.exception()) for refusal in refusals)
    assert sorted(asked) == ['start: "a"', "start: foo"]
    assert len({id(refusal.exception()) for refusal in refusals}) == 16


def test_those_used_last_are_kept(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "MAX_KEPT", 2)
    compiler = compiler_for(tokenizer)
    first, second = (compiler.compile(f'start: "{letter}"') for letter in "ab")
    assert compiler.compile('start: "a"') is first
    compiler.compile('start: "c"')
    assert compiler.compile('start: "a"') is first
    assert compiler.compile('start: "b"') is not second
    assert compiler._kept._num_bytes == 2 * len('start: "a"')


def test_large_ones_push_others_out(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "MAX_KEPT_BYTES", 300)
    compiler = compiler_for(tokenizer)
    first = compiler.compile('start: "a"')
    compiler.compile(f'start: "{"b" * 200}"')
    assert compiler.compile('start: "a"') is first
    compiler.compile(f'start: "{"c" * 200}"')
    assert len(compiler._kept._entries) == 2
    compiler.compile(f'start: "{"d" * 400}"')  # more than is kept: used, and forgotten
    assert not compiler._kept._entries
    assert compiler._kept._num_bytes == 0


def test_kept_grammars_have_a_bound_of_memory(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """The bound holds however much their replies have compiled of them."""
    grammar = compiler.compile("start: /(.*a.{20}b){10}/")
    letters = [tokenizer.encode(letter)[0] for letter in "abc"]
    rng = np.random.default_rng(0)
    before = resident_bytes()
    with pytest.raises(GrammarFailed, match="too many states"):  # noqa: PT012  one of them
        for _ in range(100):
            matcher = grammar.matcher()
            for token_id in rng.choice(letters, 400):
                allowed(matcher)
                matcher.advance([int(token_id)])
    assert (resident_bytes() - before) * compiler_module.MAX_KEPT < 1.5 * 2**30


def test_what_is_not_the_grammar_s_fault_is_tried_again(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = compiler_for(tokenizer)
    with monkeypatch.context() as patch:
        patch.setattr(compiler_module, "_PROGRAM", Path("/no/such/program.py"))
        with pytest.raises(EngineError, match="sandbox ended with status 1"):
            compiler.compile('start: "a"')
    assert not compiler._kept._entries
    compiler._tools = None
    assert isinstance(compiler.compile('start: "a"'), Grammar)


@pytest.mark.parametrize(("status", "is_kept"), [(-9, False), (None, False), (-11, True), (-signal.SIGPROF, True)])
def test_only_what_would_end_a_process_again_is_kept(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, status: int | None, is_kept: bool
) -> None:
    compiler = compiler_for(tokenizer)
    compiler.prepare()

    def killed(self: sandbox_module._Process, request: bytes) -> None:
        self.end()
        raise sandbox_module._Gone(status)

    with monkeypatch.context() as patch:
        patch.setattr(sandbox_module._Process, "ask", killed)
        with pytest.raises(InvalidRequest, match="the grammar can't be used: "):
            compiler.compile('start: "a"')
    assert len(compiler._kept._entries) == is_kept
    if is_kept:
        with pytest.raises(InvalidRequest):
            compiler.compile('start: "a"')
    else:
        assert isinstance(compiler.compile('start: "a"'), Grammar)


def test_a_vocabulary_that_cannot_be_read_fails_each_grammar(tokenizer: Tokenizer) -> None:
    def broken() -> Vocabulary:
        raise EngineError("no vocabulary")

    compiler = GrammarCompiler(broken)
    for _ in range(2):
        with pytest.raises(EngineError, match="no vocabulary"):
            compiler.compile('start: "a"')


# --- what is refused ---


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        value = {"type": "array", "items": value}
    return value


REFUSED = {
    "1 MB": ("start: " + "a" * 2**20, r"the grammar has 1048583 bytes, the limit is 524288"),
    "no grammar": ("", "Empty grammar"),
    "not Lark": ("start: (((", r"Expected token '\)'"),
    "no JSON of llguidance": ("{}", "missing field `grammars`"),
    "an unknown name": ("start: foo", 'unknown name: "foo"'),
    "an unknown special token": ("start: <|nobody|>", "unknown special token"),
    "look-around": ("start: /(?=a)b/", "look-around"),
    "oneOf that overlaps": (schema({"oneOf": [{"type": "string"}, {"pattern": "a"}]}), "oneOf"),
    "an external reference": (schema({"$ref": "http://example.com/x.json"}), "is another document"),
    "endless recursion": (schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}), "nothing can follow"),
    "a deep schema": (schema(nested(200)), "it nests 201 brackets, the limit is 100"),
    "deep parentheses": ("start: " + "(" * 90 + '"a"' + ")" * 90, "too deeply nested"),
    "a deep regular expression": ("start: /" + "(" * 101 + "a" + ")" * 101 + "/", "it nests 101 brackets"),
    "unsatisfiable": (schema({"type": "integer", "minimum": 5, "maximum": 3}), r"nothing can follow it: minimum \(5\)"),
    "many rows": (
        schema({"properties": {f"p{i}": {"type": "string"} for i in range(15_000)}}),
        "more than 0.5 s|too|signal 11",
    ),
    "what fails at its first token": (
        schema({"type": "array", "items": {"properties": {f"p{i}": {} for i in range(600)}, "type": "object"}}),
        "Current row has .* items",
    ),
    "lone surrogate": ("start: \ud800", "can't be used"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_done_is_refused_in_words_that_say_why(compiler: GrammarCompiler, name: str) -> None:
    source, message = REFUSED[name]
    with pytest.raises(InvalidRequest, match=message) as refusal:
        compiler.compile(source)
    assert len(str(refusal.value)) < 700
    assert isinstance(compiler.compile('start: "a"'), Grammar)


def test_brackets_in_quotes_are_not_nested(compiler: GrammarCompiler) -> None:
    compiler.compile(schema({"const": "(" * 200}))
    compiler.compile(schema({"const": '\\"' + "[" * 200}))


def test_rules_within_rules_fill_the_stack_of_the_process_that_tries_them(compiler: GrammarCompiler) -> None:
    """The worker's own stack is never filled: 2400 rules are too many for three quarters of a stack, not for a whole
    one.
    """
    depth = 2400
    rules = [f'r{number}: (", p{number}" | "b")? r{number + 1}' for number in range(depth)]
    with pytest.raises(InvalidRequest, match="died of signal 11"):
        compiler.compile("\n".join(["start: r0", *rules, f'r{depth}: "z"', ""]))
    assert isinstance(compiler.compile('start: "a"'), Grammar)


HOSTILE = [
    "start: /((a{0,1000}){0,1000}){0,1000}/",
    "start: /(.*a.{20}b){10}/",
    "start: /(a?){5000}a{5000}/",
    "start: A\nA: /(a|b)*a(a|b){14}/ & /(a|b)*b(a|b){15}/ & ~/.*abba.*/",
    'start: e\ne: e e | e e e | "a" | /[a-z ]+/',
    "start: " + " | ".join(f'"{number * 7919:x}"' for number in range(20_000)),
    schema(
        {"$defs": {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(40)}, "$ref": "#/$defs/a0"}
    ),
    schema({"type": "string", "maxLength": 10**9}),
    schema({"type": "array", "minItems": 10**7, "items": {"type": "integer"}}),
]


@pytest.mark.parametrize("source", HOSTILE, ids=lambda source: source[:40])
def test_a_hostile_grammar_is_refused_or_harmless(compiler: GrammarCompiler, source: str) -> None:
    """A process refuses it, and may be gone then, or each of its masks is computed within a bound."""
    try:
        grammar = compiler.compile(source)
    except InvalidRequest:
        return
    matcher = grammar.matcher()
    rng = np.random.default_rng(0)
    for _ in range(60):
        choices = sorted(allowed(matcher) - {EOS})
        if matcher.has_failed or not choices:
            break
        try:
            matcher.advance([int(rng.choice(choices))])
        except GrammarFailed:
            break


def test_while_one_grammar_takes_its_time_others_compile(compiler: GrammarCompiler) -> None:
    slow = schema({"properties": {f"q{i}": {"type": "string"} for i in range(15_000)}})
    compiler.compile('start: "warm"')
    is_asked = threading.Event()
    with ThreadPoolExecutor(1) as threads:

        def ask() -> None:
            is_asked.set()
            compiler.compile(slow)

        refused = threads.submit(ask)
        is_asked.wait()
        for number in range(5):
            compiler.compile(f'start: "{number}"')
        assert isinstance(refused.exception(), InvalidRequest)


# --- every kind of vocabulary ---

VOCABULARIES = {
    "byte level": (byte_level, (EOS,)),
    "SentencePiece": (llama2, (2,)),
    "without an end": (llama2, ()),
    "several ends": (byte_level, (263, EOS, 5)),
}


@pytest.mark.parametrize("name", VOCABULARIES)
def test_tokens_that_are_allowed_spell_what_the_grammar_says(name: str) -> None:
    make, eos = VOCABULARIES[name]
    tokenizer = Tokenizer(make())
    size = tokenizer.vocab_size + 5
    grammar = compiler_for(tokenizer, size, eos).compile('start: "the " /[aé ]*b?/ "."')
    rng = np.random.default_rng(3)
    for _ in range(20):
        matcher = grammar.matcher()
        ids: list[int] = []
        while not matcher.state.is_stopped():
            choices = sorted(allowed(matcher, size))
            assert max(choices) < tokenizer.vocab_size
            assert set(choices).isdisjoint(tokenizer.special_token_ids.values())
            ids.append(int(rng.choice(choices)))
            matcher.advance([ids[-1]])
        stream = tokenizer.detokenizer()
        text = "".join(map(stream.push, ids)) + stream.flush()
        assert text == tokenizer.decode(ids)
        assert text.startswith("the ")
        assert text.endswith(".")
        assert set(text[4:-1]) <= set("aé b")
        assert allowed(matcher, size) == set(eos)


def test_tokens_that_end_are_allowed_only_where_the_grammar_is_complete(tokenizer: Tokenizer) -> None:
    a = tokenizer.encode("a")[0]
    compiler = compiler_for(tokenizer, eos=(EOS, a))  # one of them is an ordinary letter
    matcher = compiler.compile('start: "b" ("ac")?').matcher()
    assert allowed(matcher) == {tokenizer.encode("b")[0]}
    matcher.advance(tokenizer.encode("b"))
    assert allowed(matcher) == {EOS, a}


def test_a_token_past_the_model_s_vocabulary_is_never_allowed(tokenizer: Tokenizer) -> None:
    compiler = compiler_for(tokenizer, size=100, eos=(EOS,))
    matcher = compiler.compile("start: /(.|\\n)*/").matcher()
    assert allowed(matcher, 10_000) <= {*range(100), 100}  # 100 is llguidance's own end: the mask builder drops it


def test_text_is_forced_in_tokens_that_the_model_has(tokenizer: Tokenizer) -> None:
    (joined,) = tokenizer.encode(" the")
    vocabulary = vocabulary_of(tokenizer, joined, (2,))  # up to those before it
    ids = llguidance_tokenizer(vocabulary).tokenize_str("a the")
    assert max(ids) < joined
    assert b"".join(vocabulary.token_bytes[id_] for id_ in ids) == b"a the"
    matcher = compiler_for(tokenizer, joined, (2,)).compile('start: "a the"').matcher()
    assert allowed(matcher, joined) == {tokenizer.encode("a")[0]}


@pytest.mark.parametrize("make", [metaspace, word_level])
def test_small_vocabularies_compile_too(make: Any) -> None:
    tokenizer = Tokenizer(make())
    matcher = compiler_for(tokenizer, tokenizer.vocab_size, (1,)).compile("start: /[a-zé .#']*/").matcher()
    assert 1 in allowed(matcher)
    assert len(allowed(matcher)) > 2


@pytest.mark.parametrize("make", [byte_level, llama2, metaspace, unigram])
@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_the_text_of_a_reply_is_what_its_grammar_says_from_the_first_space_on(
    make: Any, skip_special_tokens: bool
) -> None:
    tokenizer = Tokenizer(make())
    grammar = compiler_for(tokenizer, tokenizer.vocab_size, ()).compile("start: / ? ?a[ab]{0,6}( a)?/")
    params = SamplingParams(skip_special_tokens=skip_special_tokens)
    rng = np.random.default_rng(5)
    texts = set()
    for _ in range(40):
        matcher = grammar.matcher()
        stream = ReplyStreams(tokenizer).stream(Request("r", (0,), params, grammar=grammar), 0)
        text = ""
        while not matcher.is_complete and (choices := sorted(allowed(matcher, tokenizer.vocab_size))):
            id_ = int(rng.choice(choices))
            matcher.advance([id_])
            text += stream.push(id_)[0].text
        texts.add(text + stream.finish().text)
    assert all(re.fullmatch(" ? ?a[ab]{0,6}( a)?", text) for text in texts)
    assert any(text.startswith(" ") for text in texts)


def test_a_piece_that_is_listed_twice_is_the_same_text_twice() -> None:
    tokenizer = Tokenizer(unigram())
    vocabulary = vocabulary_of(tokenizer, tokenizer.vocab_size, ())
    assert [id_ for id_, data in vocabulary.token_bytes.items() if data == b"a"] == [3, 6, 10]
    assert vocabulary.names == {tokenizer.special_token_ids["</s>"]: "</s>"}
    assert b"</s>" not in vocabulary.token_bytes.values()
    matcher = compiler_for(tokenizer, tokenizer.vocab_size, ()).compile('start: "a"').matcher()
    assert set() < allowed(matcher, tokenizer.vocab_size) <= {3, 6, 10}


@settings(deadline=None, max_examples=60)
@given(text=st.text(alphabet='ab é😀{}[]":, <|end|>', max_size=30))
def test_forced_text_becomes_tokens_that_spell_it(text: str) -> None:
    for make in (byte_level, llama2):
        tokenizer = Tokenizer(make())
        vocabulary = vocabulary_of(tokenizer, tokenizer.vocab_size, (2,))
        ids = llguidance_tokenizer(vocabulary).tokenize_str(text)
        assert b"".join(vocabulary.token_bytes[id_] for id_ in ids) == text.encode()
