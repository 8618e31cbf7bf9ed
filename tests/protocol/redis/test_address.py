"""Redis URLs: what each names, what is refused, and that no password shows."""

from __future__ import annotations

import inspect
import re

import pytest
import redis.asyncio
from redis.asyncio.connection import (
    AbstractConnection,
    BlockingConnectionPool,
    Connection,
    SSLConnection,
    UnixDomainSocketConnection,
)
from redis.connection import URL_QUERY_ARGUMENT_PARSERS

from penstock.protocol.errors import BadAddress, PenstockError
from penstock.protocol.redis import address
from penstock.protocol.redis.address import parse_url

SECRET = "s3cr3t"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://", "redis://localhost:6379/0"),
        ("redis://example.org", "redis://example.org:6379/0"),
        ("redis://example.org:7000/3", "redis://example.org:7000/3"),
        ("redis://example.org/?db=4", "redis://example.org:6379/4"),
        ("redis://[::1]:7000", "redis://[::1]:7000/0"),
        ("rediss://example.org", "rediss://example.org:6379/0"),
        ("unix:///run/redis.sock", "unix:///run/redis.sock"),
        ("unix:///run/redis.sock?db=2", "unix:///run/redis.sock?db=2"),
        ("redis+cluster://a:1,b:2,c", "redis+cluster://a:1,b:2,c:6379"),
        ("rediss+cluster://a", "rediss+cluster://a:6379"),
        ("redis+sentinel://a,b:2/main", "redis+sentinel://a:26379,b:2/main/0"),
        ("rediss+sentinel://a/main/5", "rediss+sentinel://a:26379/main/5"),
    ],
)
def test_a_url_names_a_deployment(url: str, shown: str) -> None:
    assert str(parse_url(url)) == shown


def test_credentials_are_decoded() -> None:
    address = parse_url("redis://us%40er:p%3A%2Fw@example.org")
    assert (address.username, address.password) == ("us@er", "p:/w")
    address = parse_url("redis://:only@example.org")
    assert (address.username, address.password) == (None, "only")
    address = parse_url("unix:///run/redis.sock?username=u&password=p")
    assert (address.username, address.password) == ("u", "p")
    address = parse_url("redis+sentinel://u:p@a:1/main?sentinel_username=su&sentinel_password=sp")
    assert (address.username, address.sentinel_username, address.sentinel_password) == ("u", "su", "sp")


def test_options_are_parsed() -> None:
    options = parse_url("rediss://a?protocol=3&ssl_cert_reqs=none&ssl_check_hostname=false&ssl_ca_certs=/x").options
    assert options == {"protocol": 3, "ssl_cert_reqs": "none", "ssl_check_hostname": False, "ssl_ca_certs": "/x"}


@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("localhost:6379", "scheme none"),
        ("http://localhost", "scheme 'http'"),
        ("redis://a:port", "port"),
        ("redis://a:70000", "port"),
        ("redis://a/zero", "database"),
        ("redis://a/1/2", "database"),
        ("redis://a?db=x", "'db'"),
        ("redis://a?socket_timeout=1", "'socket_timeout'"),
        ("redis://a?protocol=4", "'protocol'"),
        ("redis://a?ssl_ca_certs=x", "'ssl_ca_certs' needs a TLS"),
        ("redis://a?sentinel_password=x", "'sentinel_password'"),
        ("unix://relative/path", "absolute path"),
        ("redis+cluster://a/1", "database 0"),
        ("redis+cluster://a?db=1", "database 0"),
        ("redis+sentinel://a", "name of the service"),
    ],
)
def test_what_is_wrong_is_named(url: str, match: str) -> None:
    with pytest.raises(BadAddress, match=match) as caught:
        parse_url(url)
    assert isinstance(caught.value, (PenstockError, ValueError))


@pytest.mark.parametrize(
    "url",
    [
        f"redis://user:{SECRET}@host:6379/0",
        f"redis://:{SECRET}@host",
        f"redis+cluster://user:{SECRET}@a,b",
        f"redis+sentinel://user:{SECRET}@a/main?sentinel_password={SECRET}",
        f"unix:///run/redis.sock?password={SECRET}",
    ],
)
def test_no_password_is_shown(url: str) -> None:
    address = parse_url(url)
    assert SECRET in (address.password or "")
    assert SECRET not in repr(address) + str(address)


@pytest.mark.parametrize(
    "url",
    [
        f"redis://:{SECRET}/tail@host:6379",  # characters that should have been percent-encoded
        f"redis://user:{SECRET}?tail@host",
        f"redis://user:1/{SECRET}@host",
        f"redis://user:1?{SECRET}=2@host",
        f"redis:/user:{SECRET}@host",
        f"redis://host?password={SECRET}&protocol={SECRET}",
        f"redis://host?db={SECRET}",
        f"redis+cluster://user:{SECRET}/@host",
    ],
)
def test_no_password_is_shown_by_an_error(url: str) -> None:
    with pytest.raises(BadAddress) as caught:
        parse_url(url)
    shown: list[str] = []
    error: BaseException | None = caught.value
    while error is not None:
        shown.append(str(error))
        error = error.__context__
    assert SECRET not in " ".join(shown)


@pytest.mark.parametrize(
    ("option", "understood"),
    [
        ("ssl_cert_reqs=CERT_NONE", {"ssl_cert_reqs": "none"}),
        ("ssl_cert_reqs=CERT_REQUIRED", {"ssl_cert_reqs": "required"}),
        ("ssl_cert_reqs=Optional", {"ssl_cert_reqs": "optional"}),
        ("ssl_check_hostname=False", {"ssl_check_hostname": False}),
        ("ssl_check_hostname=1", {"ssl_check_hostname": True}),
    ],
)
def test_choices_are_understood_as_other_libraries_write_them(option: str, understood: dict[str, object]) -> None:
    assert parse_url(f"rediss://a?{option}").options == understood


@pytest.mark.parametrize("name", sorted(address._ELSEWHERE))
def test_options_of_other_libraries_are_named_with_our_word(name: str) -> None:
    with pytest.raises(BadAddress, match=rf"option '{name}' of the Redis URL is not for Penstock: \w+"):
        parse_url(f"rediss://a?{name}=1")


def test_every_option_of_redis_py_is_known() -> None:
    """Only options that can stand in a URL count: what is not text is an object of the program's."""
    makers = (AbstractConnection, Connection, SSLConnection, UnixDomainSocketConnection, BlockingConnectionPool)
    names = {name for each in makers for name in inspect.signature(each.__init__).parameters}
    names |= set(inspect.signature(redis.asyncio.Redis.__init__).parameters) | set(URL_QUERY_ARGUMENT_PARSERS)
    objects = re.compile(
        r"self|kwargs|retry|cache.*|connection_.*|credential_provider|driver_info|.*_class|event_dispatcher|redis_connect_"
        r"func|himport_registry|.*maint.*|orig_.*|socket_type|auto_close_connection_pool"
    )
    unknown = names - set(address._ALLOWED_OPTIONS) - set(address._ELSEWHERE)
    assert {name for name in unknown if not objects.fullmatch(name)} == set()


@pytest.mark.parametrize(
    "url",
    ["redis://h%0a", "redis://a..b", f"redis://{'h' * 64}", "redis://h/9999999999", "redis://h?db=9999999999",
     "unix:///a%00b", "rediss://h?ssl_ca_certs=a%0ab", "redis+sentinel://h/a%0ab", "redis://h?ssl=True", "redis://[h"],
)  # fmt: skip
def test_what_could_not_be_connected_to_is_refused_at_once(url: str) -> None:
    with pytest.raises(BadAddress) as caught:
        parse_url(url)
    assert str(caught.value).isprintable()


def test_a_line_break_is_no_part_of_a_url() -> None:
    assert parse_url(" redis://u:p@a:1/2\r\n") == parse_url("redis://u:p@a:1/2")
    for url in ("redis://a\n:1", "redis://u:p\x00@a", "redis://a\x1b[0m"):
        with pytest.raises(BadAddress, match="control character"):
            parse_url(url)
