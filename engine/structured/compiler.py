"""Compiles a grammar's source into a constraint for replies."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from hashlib import sha256
from pathlib import Path

from llguidance import LLMatcher, LLTokenizer

from penstock.engine.errors import InvalidRequest
from penstock.engine.sandbox import Bounds, RequestEnded, Sandbox
from penstock.engine.structured.compile_process import LIMITS
from penstock.engine.structured.grammar import Grammar
from penstock.engine.structured.refusals import refusal
from penstock.engine.structured.vocabulary import Vocabulary, llguidance_tokenizer

MAX_SOURCE_BYTES = 2**19
MAX_KEPT = 32  # grammars, refused ones included: 0.7 GB if each has filled its lexer, a few MB with schemas
MAX_KEPT_BYTES = 2**24  # of their sources
# A grammar is compiled twice, first in the sandbox and then here: half a second there keeps the total within a second.
BOUNDS = Bounds(cpu_s=0.5, max_bytes=2**29, max_bytes_per_byte=0, max_idle_bytes=2**28)

_PROGRAM = Path(__file__).with_name("compile_process.py")


class GrammarCompiler:
    """Compiles grammars for one vocabulary, and keeps the most recently used ones. Any thread may use it.

    A grammar may be untrusted, and some take forever or exhaust all memory. So each is tried in a sandbox first; one
    that passes takes milliseconds here.
    """

    def __init__(self, vocabulary: Callable[[], Vocabulary]) -> None:
        """Prepares nothing yet: `vocabulary` is called once, on first use."""
        self._vocabulary = vocabulary
        self._tools: _Tools | None = None
        self._preparing = threading.Lock()
        self._kept = _Kept()

    def prepare(self) -> None:
        """Does the work that the first grammar would otherwise wait for. Takes a second with a large vocabulary."""
        self._prepared()

    def compile(self, source: str) -> Grammar:
        """Compiles Lark text, or llguidance's JSON. Blocks: call it neither in an event loop nor in the engine's
        thread.

        Raises:
            InvalidRequest: the source is not a grammar, llguidance can't handle it, or it exceeds a limit of size,
                nesting, time or memory.
            EngineError: no process to try it in can run here.
        """
        data = source.encode(errors="surrogatepass")
        if len(data) > MAX_SOURCE_BYTES:
            raise InvalidRequest(f"the grammar has {len(data)} bytes, the limit is {MAX_SOURCE_BYTES}")
        key = sha256(data).digest()
        future, is_new = self._kept.entry(key, len(data))
        if is_new:
            self._resolve(future, key, source)
        result = future.result()
        if isinstance(result, str):
            raise InvalidRequest(result)
        return result

    def _resolve(self, future: Future[Grammar | str], key: bytes, source: str) -> None:
        try:
            future.set_result(self._prepared().compile(source))
        except InvalidRequest as error:
            future.set_result(str(error))  # not the exception, whose traceback would grow each time it is raised
        except RequestEnded as ended:
            if not ended.is_by_request:  # it may succeed next time
                self._kept.forget(key, future)
            future.set_result(refusal(str(ended)))
        except BaseException as error:  # not the grammar's fault: it may succeed next time
            self._kept.forget(key, future)
            future.set_exception(error)

    def _prepared(self) -> _Tools:
        with self._preparing:
            if self._tools is None:
                self._tools = _Tools(self._vocabulary())
            return self._tools


class _Tools:
    def __init__(self, vocabulary: Vocabulary) -> None:
        self._eos_token_ids = vocabulary.eos_token_ids
        self._tokenizer: LLTokenizer = llguidance_tokenizer(vocabulary)
        setup = {
            "size": vocabulary.size,
            "names": dict(vocabulary.names),
            "eos_token_ids": vocabulary.eos_token_ids,
        }
        self._sandbox = Sandbox(_PROGRAM, setup, BOUNDS)
        self._sandbox.start()

    def compile(self, source: str) -> Grammar:
        """Compiles a grammar. Raises what `GrammarCompiler.compile` does, and RequestEnded."""
        answer = self._sandbox.ask(source)
        if "text" not in answer:
            raise InvalidRequest(refusal(answer.get("refused") or answer["failed"]))
        return Grammar(source, lambda: self._matcher(source), self._eos_token_ids)

    def _matcher(self, source: str) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()  # so that a reply's first step has little left to do
        if matcher.is_error():
            raise InvalidRequest(refusal(matcher.get_error()))
        return matcher


class _Kept:
    """The most recently used results, including those still being computed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[bytes, tuple[Future[Grammar | str], int]] = {}  # most recently used last
        self._num_bytes = 0

    def entry(self, key: bytes, num_bytes: int) -> tuple[Future[Grammar | str], bool]:
        """Returns the result of `key`, a grammar or a refusal, and whether the caller is to compute it."""
        with self._lock:
            found = self._entries.pop(key, None)
            if found is not None and _is_spent(found[0]):
                self._num_bytes -= found[1]
                found = None
            entry = found or (Future(), num_bytes)
            self._entries[key] = entry
            if found is None:
                self._num_bytes += num_bytes
                self._shrink()
            return entry[0], found is None

    def forget(self, key: bytes, result: Future[Grammar | str]) -> None:
        with self._lock:
            if key in self._entries and self._entries[key][0] is result:  # not a newer one
                self._num_bytes -= self._entries.pop(key)[1]

    def _shrink(self) -> None:
        while len(self._entries) > MAX_KEPT or self._num_bytes > MAX_KEPT_BYTES:
            self._num_bytes -= self._entries.pop(next(iter(self._entries)))[1]


def _is_spent(future: Future[Grammar | str]) -> bool:
    if not future.done() or future.exception() is not None:
        return False
    result = future.result()
    return isinstance(result, Grammar) and result.is_spent
