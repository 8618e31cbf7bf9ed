"""What all programs are asked, and how their checks are run. Each is started as `python NAME_chats.py URL KEY`."""

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

URL, KEY = sys.argv[1:3]
BASE = f"{URL}/v1"
MODEL = "chats"
QUESTION = "Is it noon?"
Turns: TypeAlias = list[tuple[Literal["user", "assistant"], str]]
ASKED: Turns = [("user", QUESTION)]
NO_THINKING: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}}
CITIES = ("Oslo", "Rome")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": [*CITIES]}},
    "required": ["city"],
    "additionalProperties": False,
}
WHOLE = 100  # more tokens than the answer has
TOKENIZER = Path(__file__).parents[3] / "engine/demo/model"
VOCABULARY: dict[str, int] = json.loads((TOKENIZER / "tokenizer.json").read_text())["model"]["vocab"]
TERSE = {str(number): -100 for piece, number in VOCABULARY.items() if "," in piece or not piece.strip("ĠĊ")}
"""A `logit_bias` without commas and blanks, for programs whose schemas leave objects open or whose prompts are long: an
untrained model would write fields or blanks to the end.
"""


class Api(NamedTuple):
    """An API as a program calls it. Both return the text that answers turns, up to a number of tokens.

    Attributes:
        ask: gets it in one piece, with the program's own retries.
        stream: joins what comes; None: the program has no streams.
        takes_cut: whether an answer that was cut is one, and no error.
    """

    ask: Callable[[Turns, int], str]
    stream: Callable[[Turns, int], str] | None
    takes_cut: bool = True


def as_messages(turns: Turns) -> list[Any]:
    return [{"role": role, "content": text} for role, text in turns]


def say(*words: str) -> None:
    """Tells the harness, on a line of its own: programs leave lines unfinished."""
    print("\n" + " ".join(words), flush=True)


def have(what: str) -> None:
    """Has the harness do something; returns once it has."""
    say("have:", what)
    assert sys.stdin.readline() == "done\n"


def run(apis: Mapping[str, Api], *checks: Callable[[], None]) -> None:
    """Runs the checks of every program, then a program's own, and says which have passed."""

    def chat_and_stream(api: Api) -> None:
        whole = api.ask(ASKED, WHOLE)
        assert whole
        if api.stream is not None:
            assert api.stream(ASKED, WHOLE) == whole

    def cut_and_continued(api: Api) -> None:
        whole, cut = api.ask(ASKED, WHOLE), api.ask(ASKED, 5)
        assert whole.startswith(cut)
        assert len(cut) < len(whole)
        assert api.ask([*ASKED, ("assistant", cut), ("user", "Go on.")], 40)

    def worker_killed(api: Api) -> None:
        whole = api.ask(ASKED, WHOLE)
        have("worker killed")
        assert (api.stream or api.ask)(ASKED, WHOLE) == whole
        have("looked")

    def gateway_killed(api: Api) -> None:
        whole = api.ask(ASKED, WHOLE)
        have("gateway killed")
        assert api.ask(ASKED, WHOLE) == whole
        have("looked")

    for check in (chat_and_stream, cut_and_continued, worker_killed, gateway_killed):
        names = [name for name, api in apis.items() if check is not cut_and_continued or api.takes_cut]
        for name in names:
            check(apis[name])
        said = check.__name__ if check is not chat_and_stream or any(api.stream for api in apis.values()) else "chat"
        say("passed:", said, "" if len(names) == len(apis) else f"({', '.join(names)})")
    report(apis, *checks)


def report(apis: Iterable[str], *checks: Callable[[], None]) -> None:
    """Runs a program's own checks, and says which have passed, and through which APIs it asks."""
    for check in checks:
        check()
        say("passed:", check.__name__)
    say("apis:", ", ".join(apis))
