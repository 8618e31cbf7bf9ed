"""`penstock chat`: several turns at a terminal. With a Redis or a URL it needs the light client only."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.chatting.answerers import Answerer, HttpAnswerer, Piece, StreamAnswerer
from penstock.cli.chatting.conversation import Conversation, Left, Refused
from penstock.cli.chatting.lines import reader, texts
from penstock.cli.shared.answer import AnswerWriter
from penstock.cli.shared.errors import USAGE, CommandFailed, require_worker_extra
from penstock.cli.shared.options import takes_settings
from penstock.cli.shared.redis import visible
from penstock.cli.shared.waiting import prefill_sentence
from penstock.local.data_folder import DataFolder, default_data_dir
from penstock.local.progress import spinner
from penstock.local.worker_process import DEMO_SIZES
from penstock.producer import Client, Prefill
from penstock.protocol.errors import PenstockError
from penstock.protocol.reply import Chunk
from penstock.worker.logs import configure_logs
from penstock.worker.settings import DEMO_MODEL, Settings
from penstock.worker.settings_loading import SettingsError

if TYPE_CHECKING:
    from penstock.local.engine_options import EngineOptions

_OF_ENGINE = ("dtype", "weights", "max_model_len", "compile_cache_dir")


@takes_settings(["redis_url", "queue", *_OF_ENGINE])
def chat(
    *,
    settings: Settings,
    model: Annotated[
        str | None,
        typer.Argument(
            help="A model to load into this process, without a queue; with --url, its name there.", metavar="MODEL"
        ),
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="Ask a gateway, or any server with OpenAI's API.", metavar="TEXT")
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="API key for --url.", metavar="TEXT")] = None,
    system: Annotated[str | None, typer.Option(help="System message.", metavar="TEXT")] = None,
) -> None:
    """Chat with a model, several turns long: with the workers of a queue, a gateway (--url), or a model by itself.

    Without any of them it finds the `penstock serve` that runs here. /help shows the commands, among them /system,
    /set, /reset and /save. Ctrl-C stops an answer, Ctrl-D leaves. From a file or a pipe, each line is a turn.

    Exit status: 0; 1 if it could not begin, or a turn from a file or a pipe failed; 2 wrong usage.
    """
    if api_key is not None and url is None:
        raise CommandFailed("--api-key is for --url: through Redis its own password decides", USAGE)
    configure_logs("warning", settings.log_format, sys.stderr)
    with _answerer(settings, model, url, api_key) as answerer:
        screen = _Screen(is_typed=sys.stdin.isatty())
        screen.note(f"{answerer.place}; /help shows the commands, Ctrl-D leaves")
        _converse(answerer, Conversation(system), screen)
    if screen.has_failed and not screen.is_typed:
        raise typer.Exit(1)


def _converse(answerer: Answerer, conversation: Conversation, screen: _Screen) -> None:
    for text in texts(reader()):
        try:
            if text.startswith("/"):
                screen.note(conversation.command(text))
            else:
                _take_turn(answerer, conversation, text, screen)
        except Left:
            return
        except (Refused, PenstockError) as error:
            screen.fail(str(error))


def _take_turn(answerer: Answerer, conversation: Conversation, text: str, screen: _Screen) -> None:
    """Answers one text. A stopped answer is kept as far as it came, a failed one is not."""
    answer = _Answer()
    try:
        asked = conversation.ask(text), conversation.settings
        with closing(answerer.answer(*asked, screen.tell_prefill)) as pieces:  # type: ignore[type-var]
            for piece in screen.waited(pieces):
                answer.add(piece)
    except KeyboardInterrupt:
        answer.finish_reason = "stopped"
    finally:
        answer.writer.end()
    conversation.answered(text, answer.text)
    screen.note(answer.summary())


@dataclass(slots=True)
class _Answer:
    """An answer as it comes, written to the terminal."""

    writer: AnswerWriter = field(default_factory=AnswerWriter)
    text: str = ""
    num_tokens: int = 0
    finish_reason: str | None = None
    begun_s: float = field(default_factory=time.monotonic)
    first_s: float | None = None

    def add(self, piece: Piece) -> None:
        if (piece.text or piece.reasoning) and self.first_s is None:
            self.first_s = time.monotonic()
        self.text += piece.text
        self.num_tokens = piece.num_tokens or self.num_tokens
        self.finish_reason = piece.finish_reason or self.finish_reason
        self.writer.add(Chunk(piece.text, (), 0, 0, None, "", reasoning=piece.reasoning))
        sys.stdout.flush()

    def summary(self) -> str:
        """Says how fast it came, and why it ended if the model did not end it."""
        said = []
        if self.num_tokens and self.first_s is not None:
            said.append(f"{self.num_tokens} tokens, the first after {self.first_s - self.begun_s:.2f} s")
            took_s = time.monotonic() - self.first_s
            if self.num_tokens > 1 and took_s > 0:
                said.append(f"{(self.num_tokens - 1) / took_s:.1f} tokens/s")
        if self.finish_reason not in (None, "stop"):
            said.append("cut off at max_tokens" if self.finish_reason == "length" else str(self.finish_reason))
        return ", ".join(said)


@dataclass(slots=True)
class _Screen:
    """Says on stderr what is not an answer: answers alone are the output."""

    is_typed: bool
    has_failed: bool = False
    _say: Callable[[str], None] | None = None  # while it shows that it waits

    def note(self, text: str) -> None:
        if text and self.is_typed:
            typer.secho(visible(text), err=True, dim=sys.stderr.isatty())

    def fail(self, text: str) -> None:
        self.has_failed = True
        typer.secho(f"penstock: {visible(text)}", err=True)

    def tell_prefill(self, prefill: Prefill) -> None:
        if self._say is not None:
            self._say(prefill_sentence(prefill))

    def waited(self, pieces: Iterator[Piece]) -> Iterator[Piece]:
        """Shows that it waits, until the first piece."""
        with spinner("waiting for the first token") as self._say:
            first = next(pieces, None)
        self._say = None
        if first is not None:
            yield first
            yield from pieces


@contextmanager
def _answerer(settings: Settings, model: str | None, url: str | None, key: str | None) -> Iterator[Answerer]:
    with ExitStack() as stack:
        if url is not None:
            yield HttpAnswerer(url, model, key)
        elif model is not None:
            yield stack.enter_context(_loaded(settings, model))
        else:
            address = _redis_url(settings)
            client = stack.enter_context(Client(address, queue=settings.queue))
            yield StreamAnswerer(client, f"queue {settings.queue}")


@contextmanager
def _loaded(settings: Settings, model: str) -> Iterator[Answerer]:
    """Loads the model into this process.

    Raises:
        SettingsError: it can't be loaded.
    """
    require_worker_extra()
    from penstock.engine.errors import EngineError
    from penstock.local.llm import LLM  # loads jax, which a light install lacks

    sizes = DEMO_SIZES if model == DEMO_MODEL else {"max_num_seqs": 1}
    options: EngineOptions = {**sizes, **{name: getattr(settings, name) for name in _OF_ENGINE}}  # type: ignore[typeddict-item]
    try:
        llm = LLM(model, **options)
    except EngineError as error:
        raise SettingsError(f"MODEL {model}: {error}") from error
    with llm:
        yield StreamAnswerer(llm, model)


def _redis_url(settings: Settings) -> str:
    """Returns the address that is set, else that of a `penstock serve` on this machine."""
    if "redis_url" not in settings.model_fields_set:
        try:
            owner = DataFolder(default_data_dir()).owner()
        except RuntimeError:  # no home folder
            owner = None
        if owner is not None:
            return owner.redis_url
    return settings.redis_url
