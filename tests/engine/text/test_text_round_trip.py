"""Each template's replies are read by the format that reads back what the template itself writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from penstock.engine.request import ResponseSpec
from penstock.engine.text.bridges.limits import UNREAD_CALLS
from penstock.engine.text.bridges.round_trip import Ability, Readback
from penstock.engine.text.conversation import Conversation
from penstock.engine.text.response.formats import FORMATS
from penstock.engine.text.tokenizer import Tokenizer
from tests.engine.text.formats_page import DOCS, page
from tests.engine.text.reply_texts import Message, parser, read
from tests.engine.text.templates_for_tests import TEMPLATES, read_back, readback_of
from tests.engine.tokenizers_for_tests import byte_level

ALL = frozenset(Ability)
CALLS = ALL - {Ability.REASONING}
# The format of each template, and what it writes, all of which must come back.
READ: Mapping[str, tuple[str, frozenset[Ability]]] = {
    "apriel": ("tool_calls_list", CALLS),
    "command_r7b": ("command_r7b", ALL),
    "deepseek": ("deepseek_v3", CALLS),
    "deepseek_v31": ("deepseek_v31", CALLS),
    "deepseek_v32": ("deepseek_v32", ALL),
    "deepseek_v4": ("deepseek_v4", ALL),
    "ernie": ("ernie", ALL),
    "gemma": ("function_gemma", CALLS),
    "gemma4": ("gemma", ALL),
    "glm": ("glm", ALL),
    "gpt_oss": ("gpt_oss", ALL - {Ability.CALLS}),
    "granite_3": ("granite", frozenset({Ability.TEXT})),
    "hermes": ("hermes", ALL),
    "hy_v3": ("hy_v3", ALL),
    "hy_v3_opensource": ("hy_v3_opensource", ALL),
    "hyperclovax": ("hyperclovax", ALL),
    "kimi_k2": ("kimi_k2", ALL),
    "lfm2": ("lfm2", frozenset({Ability.TEXT})),
    "lfm2_5": ("lfm2", ALL),
    "llama3": ("llama3_json", CALLS - {Ability.CALLS}),
    "llama_pythonic": ("llama_pythonic", CALLS),
    "minimax_m2": ("minimax_m2", ALL),
    "mistral": ("mistral_list", CALLS),
    "mistral_v11": ("mistral", ALL),
    "mistral_v13": ("mistral", ALL),
    "nemotron": ("nemotron", ALL),
    "olmo3": ("olmo3", CALLS),
    "phi4_mini": ("phi4_mini", frozenset({Ability.TEXT})),
    "qwen3_coder": ("qwen3_coder", ALL),
    "seed_oss": ("seed_oss", ALL),
    "solar_open": ("solar_open", ALL),
}


def test_every_template_and_every_format_is_here() -> None:
    assert set(TEMPLATES) == set(READ)
    assert {format_ for format_, _ in READ.values()} == set(FORMATS)


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("special", [False, True], ids=["tags are text", "tags are tokens"])
def test_what_a_template_writes_comes_back(name: str, special: bool) -> None:
    format_, written = READ[name]
    found = readback_of(name, special=special)
    assert (found.format, found.written, found.read) == (format_, written, written)


def changed(name: str, old: str, new: str) -> Readback:
    assert old in TEMPLATES[name]
    return read_back(TEMPLATES[name].replace(old, new))


def test_what_comes_back_wrong_is_told_and_the_rest_is_honoured() -> None:
    assert changed("hermes", "<think>\\n", "<thought>\\n").fails(Ability.REASONING)
    twice = changed(
        "llama_pythonic",
        "'' if loop.last else ', ') }}{%- endfor %}\n            {{- ')' + ('' if loop.last else ', ')",
        "'' if loop.last else ', ') }}{%- endfor %}\n            {{- ')' + ('' if loop.last else ' and ')",
    )
    assert (twice.format, [each for each in Ability if twice.fails(each)]) == ("llama_pythonic", [Ability.CALLS])
    typed = changed("hermes", "tool_call.arguments | tojson", "(tool_call.arguments | tojson).replace('3', '\"3\"')")
    assert (typed.format, [each for each in Ability if typed.fails(each)]) == ("hermes", [Ability.TYPES])


def test_calls_that_no_format_reads_leave_the_reasoning() -> None:
    readback = changed("hermes", '"name"', '"function"')
    assert (readback.format, readback.fails(Ability.CALL), readback.fails(Ability.REASONING)) == ("hermes", True, False)


def test_fragments_of_other_formats_do_not_count() -> None:
    """A template may speak of another one's tags."""
    assert (
        changed("seed_oss", "<seed:tool_call>\\n<function=example>", "<tool_call>\\n<function=example>").format
        == "seed_oss"
    )
    assert read_back("<tool_call>{% for m in messages %}{{ m.content }}{% endfor %}").format == "hermes"
    assert read_back("{% for m in messages %}{{ m.content }}{% endfor %}").format is None
    assert read_back("{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}").format == "hermes"


def test_a_template_that_renders_nothing_has_the_format_that_its_tags_name() -> None:
    assert read_back("{{ 1 // 0 }}<arg_key>") == Readback("glm")


def test_a_message_is_continued_behind_the_template_s_own_head() -> None:
    source = TEMPLATES["hermes"].replace("<|im_start|>", "[turn ").replace("<|im_end|>", "[end]")
    tokenizer = Tokenizer(byte_level(chat_template=source))
    said = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nOn"}]
    chat = tokenizer.encode_chat(Conversation(said, continue_final_message=True))
    assert (chat.reply_format, chat.reply_prefix) == ("hermes", said[1]["content"])
    assert tokenizer.encode_chat(Conversation(said)).reply_prefix == ""
    assert tokenizer.encode_chat(Conversation(said, add_generation_prompt=False)).reply_prefix == ""


def limits_and_chat(source: str, setting: str = "auto") -> tuple[list[str], Any]:
    tokenizer = Tokenizer(byte_level(chat_template=source), setting)
    return tokenizer.limits(), tokenizer.encode_chat(Conversation([{"role": "user", "content": "Hi."}]))


def test_what_is_not_read_is_a_limit_and_told_to_requests_unless_the_format_is_set() -> None:
    source = TEMPLATES["hermes"].replace('"name"', '"function"')
    limits, chat = limits_and_chat(source)
    assert UNREAD_CALLS in limits
    assert (chat.reply_format, chat.reads_calls, chat.reads_reasoning) == ("hermes", False, True)
    limits, chat = limits_and_chat(source, "hermes")
    assert UNREAD_CALLS in limits
    assert (chat.reply_format, chat.reads_calls) == ("hermes", True)
    limits, chat = limits_and_chat(source, "none")
    assert (chat.reply_format, UNREAD_CALLS in limits) == (None, False)


def test_reasoning_that_is_not_read_stays_text() -> None:
    reading = parser("hermes", spec=ResponseSpec("hermes", reads_reasoning=False))
    assert read(reading, ["<think>a</think>b"]) == Message("<think>a</think>b")


def test_the_page_tells_what_is_read() -> None:
    text = DOCS.read_text()
    assert page(text) == text, "run `make docs`"
