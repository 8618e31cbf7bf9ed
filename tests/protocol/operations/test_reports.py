"""Workers' reports about themselves; docs/wire.md says the same."""

from __future__ import annotations

import re

import pytest

from penstock.protocol.operations.reports import (
    MAX_REPORTED,
    REMEMBERED_S,
    ReportedRequest,
    WorkerReport,
    decode_report,
)
from tests.support.packages import ROOT

TEXT = (ROOT / "docs" / "wire.md").read_text().split("## Reports\n")[1].split("\n## ")[0]
REQUEST = ReportedRequest(id="r", enqueued_ms=1, claimed_ms=2, turn=3, tokens=4)


def test_every_field_is_documented() -> None:
    named = set(re.findall(r"`(\w+)`", TEXT))
    assert {*WorkerReport.model_fields, *ReportedRequest.model_fields} <= named
    assert str(MAX_REPORTED) in TEXT
    assert f"{REMEMBERED_S:g} s after" in TEXT


def test_what_is_encoded_is_decoded_and_later_fields_are_ignored() -> None:
    report = WorkerReport(version="1", phase="draining", slots=8, requests=(REQUEST,))
    text = report.encode()
    assert decode_report(text.encode()) == report
    assert decode_report(text.replace('"slots"', '"later":{},"slots"').encode()) == report


@pytest.mark.parametrize("text", [b"", b"\xff", b"[]", b"{}", b'{"version":"1","phase":"asleep"}'])
def test_what_is_no_report_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match="the worker report's key holds no valid report"):
        decode_report(text)
