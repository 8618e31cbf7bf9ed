"""The address of Redis in the environment."""

from __future__ import annotations

import os
from contextlib import suppress

from penstock.protocol.errors import BadAddress
from penstock.protocol.redis.address import Address, check_files, parse_url

DEFAULT_URL = "redis://localhost:6379"
URL_VARIABLES = ("PENSTOCK_REDIS_URL", "REDIS_URL")


def known_address(shown: str) -> Address:
    """Returns the address that `str(address)` shows as this text.

    User, password and options are known only if it is the address in the environment.

    Raises:
        BadAddress: the text is not an address.
    """
    with suppress(BadAddress):
        address = address_from_environment()
        if str(address) == shown:
            return address
    return parse_url(shown)


def address_from_environment() -> Address:
    """Reads the address of Redis from the environment. An empty variable counts as not set, as everywhere.

    Raises:
        BadAddress: the URL can't be used; the message begins with the variable's name.
    """
    given = ((name, url) for name in URL_VARIABLES if (url := os.environ.get(name)))
    name, url = next(given, ("the default", DEFAULT_URL))
    try:
        address = parse_url(url)
        check_files(address)
    except BadAddress as error:
        raise BadAddress(f"{name}: {error}") from error
    return address
