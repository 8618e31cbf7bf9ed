"""Host names and addresses, as settings and URLs have them."""

from __future__ import annotations

import re

_HOST = re.compile(r"[\w.:%-]{1,255}")


def is_host(text: str) -> bool:
    """Whether the text could be a host. Anything else would end in resolver errors that name no setting."""
    try:
        text.encode("idna")  # as sockets do: no label is empty or longer than 63 bytes
    except UnicodeError:
        return False
    return bool(_HOST.fullmatch(text))
