"""docs/wire.md says what protocol/wire does."""

from __future__ import annotations

import re
from typing import get_args

import pytest
from pydantic import BaseModel

from penstock.protocol import keys
from penstock.protocol.wire import (
    PARAMETERS,
    REFUSED_CODES,
    VERSION,
    ChunkEntry,
    EndEntry,
    FinishReason,
    GenerateRequest,
    OwnEntry,
)
from penstock.protocol.wire.messages import MAX_CALLS, MAX_MESSAGES, MAX_PARTS, Message
from penstock.protocol.wire.values import MAX_NESTING
from tests.support.packages import ROOT

TEXT = (ROOT / "docs" / "wire.md").read_text()


def rows(header: str) -> dict[str, list[str]]:
    """Returns the rows of the table with this header line, by the code in their first cell."""
    table = TEXT.split(header, 1)[1].split("\n\n", 1)[0]
    found = {}
    for line in table.splitlines()[2:]:
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        for name in re.findall(r"`([^`]+)`", cells[0]):
            found[name] = cells[1:]
    return found


REQUEST_ROWS = rows("| field | values | default | meaning |")


def test_every_field_of_a_request_is_there() -> None:
    """The page's table of parameters is written from their declaration."""
    assert REQUEST_ROWS.keys() == GenerateRequest.model_fields.keys() - PARAMETERS.keys()


def test_every_field_of_a_message_is_there() -> None:
    cells = "".join(
        line.split(" | ")[0] for line in TEXT.split("| message | values | meaning |")[1].split("\n\n")[0].splitlines()
    )
    assert set(re.findall(r"`([a-z_]+)`", cells)) == {*Message.model_fields, *Message.other_names}
    assert all(f"`{name}" in TEXT for name in (*GenerateRequest.other_names, "top_logprobs"))


def test_the_limits_of_chats_are_there() -> None:
    assert f"at most {MAX_MESSAGES} messages" in REQUEST_ROWS["messages"][0]
    fields = rows("| message | values | meaning |")
    assert f"at most {MAX_PARTS} " in fields["content"][0]
    assert f"at most {MAX_CALLS} " in fields["tool_calls"][0]
    assert f"nested at most {MAX_NESTING} deep" in " ".join(TEXT.split())


@pytest.mark.parametrize("entry", [OwnEntry, ChunkEntry, EndEntry])
def test_every_field_of_a_reply_entry_is_there(entry: type[BaseModel]) -> None:
    kind = entry.model_fields["type"].default
    section = TEXT.split(f"**`{kind}`**", 1)[1]
    documented = set(re.findall(r"`([a-z_]+)`", "".join(line.split(" | ")[0] for line in _first_table(section))))
    assert documented == set(entry.model_fields) - {"type"}


def test_reasons_codes_and_version_are_there() -> None:
    assert all(f"`{reason}`" in TEXT for reason in get_args(FinishReason))
    codes = rows("| code | generated before | meaning |")
    assert {code for code, cells in codes.items() if cells[0] == "nothing"} == REFUSED_CODES
    assert TEXT.startswith(f"# The wire, version {VERSION}\n")


def test_the_group_is_there() -> None:
    assert f"`{keys.GROUP}`" in TEXT


def test_the_limits_are_those_of_the_worker() -> None:
    from penstock.worker.config import WorkerConfig

    config = WorkerConfig()
    section = " ".join(TEXT.split("### Limits", 1)[1].split("###", 1)[0].split())
    assert "`max_body_bytes` (of a whole entry, 1 MiB)" in section
    assert config.max_body_bytes == 1 << 20
    for name in ("max_stop_strings", "max_stop_chars", "max_n", "max_keep_s"):
        assert re.search(rf"`{name}` \({getattr(config, name):g}\b", section), name
    assert (config.reply_ttl_after_end_s, config.reply_ttl_s) == (3600, 86_400)


def _first_table(text: str) -> list[str]:
    lines = text[text.index("\n| field") :].strip("\n").split("\n\n", 1)[0].splitlines()
    return lines[2:]
