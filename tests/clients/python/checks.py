"""What all programs are asked, and how their checks are run. Each is started as `python NAME_chats.py URL`."""

import sys
from collections.abc import Callable
from typing import Any

URL = sys.argv[1]
BASE = f"{URL}/v1"
MODEL = "chats"
KEY = "none"
QUESTION = "Is it noon?"
ASKED: list[Any] = [{"role": "user", "content": QUESTION}]
NO_THINKING: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}}
CITIES = ("Oslo", "Rome")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": [*CITIES]}},
    "required": ["city"],
    "additionalProperties": False,
}


def run(*checks: Callable[[], None]) -> None:
    """Runs the checks, and says which have passed."""
    for check in checks:
        check()
        print("passed:", check.__name__, flush=True)
