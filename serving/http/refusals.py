"""Refusals of requests before the application sees them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from http import HTTPStatus

RETRY_AFTER_S = 1
"""When a client that was told that the server is full may retry."""


class Refused(Exception):
    """Ends the parsing of a request. The answer is this error, in OpenAI's form.

    Args:
        status: the HTTP status.
        message: for people.
        code: for programs.
        may_pass: whether a retry may help.
    """

    def __init__(self, status: int, message: str, code: str, *, may_pass: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.may_pass = may_pass

    def answer(self) -> bytes:
        """Returns the whole answer, after which the connection is closed."""
        kind = "server_error" if self.may_pass else "invalid_request_error"
        detail = {"message": self.message, "type": kind, "param": None, "code": self.code}
        body = json.dumps({"error": detail}).encode()
        retry = f"retry-after: {RETRY_AFTER_S}\r\nx-should-retry: true\r\n" if self.may_pass else ""
        head = (
            f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}\r\nconnection: close\r\n{retry}"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


FULL = Refused(503, "the server has as many connections as it may; try again", "unavailable", may_pass=True)


def wrong_head(version: str, headers: Sequence[tuple[bytes, bytes]]) -> Refused | None:
    """Returns what is wrong with a request's head that the parser has accepted.

    Args:
        version: the HTTP version, such as `1.1`.
        headers: the headers, with names in lower case.
    """
    if version not in ("1.0", "1.1"):
        return Refused(505, f"HTTP {version} is not served, HTTP 1.1 is", "http_version_not_supported")
    num_hosts = sum(name == b"host" for name, _ in headers)
    if num_hosts > 1 or (num_hosts == 0 and version == "1.1"):
        return Refused(400, f"the request has {num_hosts} Host headers, not one", "invalid_http")
    return _wrong_codings(version, [value for name, value in headers if name == b"transfer-encoding"])


def _wrong_codings(version: str, values: Sequence[bytes]) -> Refused | None:
    """Refuses all codings but chunked: the parser looks only at the last one, and HTTP/1.0 has none (RFC 9112, 6.1 and
    6.3).
    """
    codings = [coding for value in values for each in value.split(b",") if (coding := each.strip().lower())]
    if values and (version == "1.0" or codings[-1:] != [b"chunked"]):
        return Refused(400, "where the body ends can't be told by its Transfer-Encoding", "invalid_http")
    if len(codings) > 1:
        return Refused(501, "the only Transfer-Encoding that is known is chunked", "not_implemented")
    return None
