"""Three ways to have a chat answered: by workers behind a Redis, by a gateway, by a model in this process."""

from __future__ import annotations

import http.client
import json
import re
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias
from urllib.parse import SplitResult, urlsplit

from penstock.producer import Client, Prefill
from penstock.protocol.errors import PenstockError
from penstock.worker.settings_loading import SettingsError

if TYPE_CHECKING:
    from penstock.local.llm import LLM  # loads jax

Messages: TypeAlias = Sequence[Mapping[str, Any]]

_CONNECT_TIMEOUT_S = 10.0
_LONGEST_LINE = 2**22
_PREFILL = re.compile(r": prefill ([0-9]{1,9})/([0-9]{1,9})")
_SHOWN = 500  # characters of an answer that is not JSON


@dataclass(frozen=True, slots=True)
class Piece:
    """The next part of an answer. The number of tokens and the reason come when they are known, at the latest last."""

    text: str = ""
    reasoning: str = ""
    num_tokens: int = 0
    finish_reason: str | None = None


class NotAnswered(PenstockError):
    """The gateway refused the request, or can't be reached. The message says why."""


class Answerer(Protocol):
    """Answers a chat. Leaving the iteration early ends the request."""

    @property
    def place(self) -> str:
        """Names who answers, for people."""

    def answer(
        self, messages: Messages, settings: Mapping[str, Any], on_prefill: Callable[[Prefill], object]
    ) -> Iterator[Piece]:
        """Yields the answer as it comes. `on_prefill` is called with the progress of a long prompt, from any thread.

        Raises (while iterating):
            PenstockError: there is none, or it broke off.
        """


class StreamAnswerer:
    """Answers by the Python library: a `Client`, or an `LLM`, which has the same `stream`."""

    def __init__(self, client: Client | LLM, place: str) -> None:
        self._client = client
        self.place = place

    def answer(
        self, messages: Messages, settings: Mapping[str, Any], on_prefill: Callable[[Prefill], object]
    ) -> Iterator[Piece]:
        with closing(self._client.stream(messages, **settings)) as stream:  # settings were checked when set
            stream.on_prefill(on_prefill)
            for chunk in stream:
                yield Piece(chunk.text, chunk.reasoning)
            if stream.reply is not None:
                yield Piece(num_tokens=stream.reply.usage.completion_tokens, finish_reason=stream.reply.finish_reason)


class HttpAnswerer:
    """Answers through OpenAI's API of a gateway, or of any server that has it.

    Args:
        url: the server's, with or without `/v1`.
        model: its name there; None: the first that the server lists.
        key: sent in the header `authorization`.

    Raises:
        SettingsError: `url` is not the URL of a server.
        NotAnswered: the server does not name a model.
    """

    def __init__(self, url: str, model: str | None, key: str | None) -> None:
        self._at = _parsed(url)
        self._path = self._at.path.rstrip("/").removesuffix("/v1") + "/v1"
        self._headers = {"content-type": "application/json", "accept": "text/event-stream, application/json"}
        if key is not None:
            self._headers["authorization"] = f"Bearer {key}"
        self._model = model or self._first_model()
        self.place = f"{self._model} at {url}"

    def answer(
        self, messages: Messages, settings: Mapping[str, Any], on_prefill: Callable[[Prefill], object]
    ) -> Iterator[Piece]:
        """Yields the answer as it comes. Our gateway reports the progress of a prompt, once it has sent its status."""
        body = {"model": self._model, "messages": messages, "stream": True, **settings}
        body["stream_options"] = {"include_usage": True}
        with closing(self._connected()) as connection:
            try:
                answer = self._asked(connection, "POST", "/chat/completions", json.dumps(body))
                for event in _events(answer, on_prefill):
                    yield _piece(event)
            except (OSError, http.client.HTTPException) as error:
                raise self._unreachable(error) from error

    def _first_model(self) -> str:
        with closing(self._connected()) as connection:
            try:
                models = json.loads(self._asked(connection, "GET", "/models").read())["data"]
                return str(models[0]["id"])
            except (OSError, http.client.HTTPException) as error:
                raise self._unreachable(error) from error
            except (ValueError, KeyError, TypeError):
                raise NotAnswered(f"{self._at.geturl()}{self._path}/models is not a list of models") from None
            except IndexError:
                raise NotAnswered(f"{self._at.geturl()} serves no model yet") from None

    def _connected(self) -> http.client.HTTPConnection:
        host, port = self._at.hostname or "", self._at.port
        if self._at.scheme == "http":
            return http.client.HTTPConnection(host, port, timeout=_CONNECT_TIMEOUT_S)
        return http.client.HTTPSConnection(host, port, timeout=_CONNECT_TIMEOUT_S, context=ssl.create_default_context())

    def _asked(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: str | None = None
    ) -> http.client.HTTPResponse:
        connection.connect()
        connection.sock.settimeout(None)  # an answer takes as long as it takes; Ctrl-C ends it
        connection.request(method, self._path + path, body, self._headers)
        answer = connection.getresponse()
        if answer.status != HTTPStatus.OK:
            raise NotAnswered(_refusal(answer.status, answer.read().decode(errors="replace")))
        return answer

    def _unreachable(self, error: Exception) -> NotAnswered:
        return NotAnswered(f"{self._at.geturl()} can't be reached, or broke off: {error or type(error).__name__}")


def _parsed(url: str) -> SplitResult:
    try:
        at = urlsplit(url)
        is_one = at.scheme in ("http", "https") and bool(at.hostname) and at.port != 0
    except ValueError:  # its port is not a number
        is_one = False
    if not is_one:
        raise SettingsError(f"--url: must be a URL such as http://127.0.0.1:8000, not {url!r}")
    return at


def _events(answer: http.client.HTTPResponse, on_prefill: Callable[[Prefill], object]) -> Iterator[dict[str, Any]]:
    """Yields the objects of a stream of server-sent events."""
    while line := answer.readline(_LONGEST_LINE):
        data = line.decode(errors="replace").strip()
        if found := _PREFILL.fullmatch(data):
            on_prefill(Prefill(int(found[1]), int(found[2])))
        if not data.startswith("data:"):
            continue
        data = data.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        try:
            event = json.loads(data)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            raise NotAnswered(f"the server sent something that is not an event: {data:.{_SHOWN}}")
        if "error" in event:
            raise NotAnswered(_message_of(event) or data)
        yield event
    raise NotAnswered("the server ended the answer before its end")


def _piece(event: dict[str, Any]) -> Piece:
    choice: dict[str, Any] = next(iter(event.get("choices") or []), {})
    delta, usage = choice.get("delta") or {}, event.get("usage") or {}
    return Piece(
        delta.get("content") or "",
        delta.get("reasoning_content") or delta.get("reasoning") or "",
        usage.get("completion_tokens") or 0,
        choice.get("finish_reason"),
    )


def _refusal(status: int, text: str) -> str:
    try:
        message = _message_of(json.loads(text))
    except ValueError:
        message = None
    return f"the server answered {status}: {message or text[:_SHOWN]}"


def _message_of(document: Any) -> str | None:
    error = document.get("error") if isinstance(document, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) else None
