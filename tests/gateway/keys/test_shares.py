"""Requests that count together, the connections they may take, and the fewest descriptors with which a
gateway starts.
"""

from __future__ import annotations

import resource
from contextlib import ExitStack

import pytest
from starlette.requests import HTTPConnection

from penstock.gateway import serve
from penstock.gateway.admission.shares import Shares
from penstock.gateway.errors import ApiError
from penstock.gateway.http.addresses import client_network, networks
from penstock.gateway.settings import GatewaySettings

OTHERS = serve._OTHER_DESCRIPTORS


def fill(shares: Shares, held: ExitStack, client: str) -> int:
    """Takes all that a client can get; returns how many."""
    num_taken, refusal = 0, None
    while refusal is None:
        try:
            held.enter_context(shares.taken(client))
            num_taken += 1
        except ApiError as error:
            refusal = error
    assert (refusal.status, refusal.code, refusal.retry_after_s) == (503, "unavailable", 1)
    return num_taken


@pytest.mark.parametrize(("num_connections", "expected"), [(1, [1]), (2, [1, 1]), (3, [2, 1]), (100, [50, 25, 13, 6])])
def test_whoever_takes_all_leaves_some_to_who_comes_next(num_connections: int, expected: list[int]) -> None:
    shares = Shares(num_connections)
    with ExitStack() as held:
        assert [fill(shares, held, f"client{place}") for place in range(len(expected))] == expected
    with ExitStack() as held:
        assert fill(shares, held, "later") == expected[0]
    assert not shares._held


def test_many_clients_that_take_turns_have_as_many_each() -> None:
    shares, taken = Shares(90), dict.fromkeys(("a", "b"), 0)
    with ExitStack() as held:
        for _ in range(90):
            for client in taken:
                try:
                    held.enter_context(shares.taken(client))
                    taken[client] += 1
                except ApiError:
                    pass
        assert taken == {"a": 30, "b": 30}


PROXIES = ("10.0.0.0/8", "192.0.2.7", "2001:db8::/48")
CAME: dict[str, tuple[str, list[str], str]] = {
    "directly": ("198.51.100.1", [], "198.51.100.1"),
    "directly, and says otherwise": ("198.51.100.1", ["203.0.113.9"], "198.51.100.1"),
    "by a proxy": ("10.1.2.3", ["203.0.113.9"], "203.0.113.9"),
    "by a proxy that says nothing": ("10.1.2.3", [], "10.1.2.3"),
    "by a proxy that does not know": ("10.1.2.3", ["unknown"], "10.1.2.3"),
    "by two": ("10.1.2.3", ["203.0.113.9, 192.0.2.7"], "203.0.113.9"),
    "by two, in two headers": ("10.1.2.3", ["203.0.113.9", "192.0.2.7"], "203.0.113.9"),
    "by a proxy, and makes up who it is": ("10.1.2.3", ["127.0.0.1, 203.0.113.9"], "203.0.113.9"),
    "by a proxy, from one of them": ("10.1.2.3", ["10.9.9.9"], "10.9.9.9"),
    "with a port": ("10.1.2.3", ["203.0.113.9:4711"], "203.0.113.9"),
    "by IPv6": ("2001:db9:1:2:3:4:5:6", [], "2001:db9:1:2::/64"),
    "by IPv6 and a proxy": ("2001:db8::1", ["[2001:db9:1:2::9]:443"], "2001:db9:1:2::/64"),
    "by IPv4 at an address of IPv6": ("::ffff:10.1.2.3", ["203.0.113.9"], "203.0.113.9"),
    "from a scope": ("fe80::1%eth0", [], "fe80::/64"),
    "from nowhere": ("", ["203.0.113.9"], ""),
}


@pytest.mark.parametrize("how", CAME)
def test_an_address_is_the_client_s_where_a_trusted_proxy_says_it(how: str) -> None:
    peer, passed_on, expected = CAME[how]
    headers = [(b"x-forwarded-for", value.encode()) for value in passed_on]
    connection = HTTPConnection({"type": "http", "client": (peer, 1), "headers": headers})
    assert client_network(connection, networks(PROXIES)) == expected
    if not peer.startswith(("10.", "::ffff", "2001:db8:")):
        assert client_network(connection, ()) == expected


@pytest.mark.parametrize("wrong", ["proxy.example", "10.0.0.0/33", "*"])
def test_what_is_no_network_is_no_proxy(wrong: str) -> None:
    with pytest.raises(ValueError, match="neither an address nor a network"):
        GatewaySettings(trusted_proxies=("10.0.0.0/8", wrong))


@pytest.mark.parametrize(("soft", "hard"), [(300, 300), (64, OTHERS + 15), (OTHERS + 15, OTHERS + 15)])
def test_with_too_few_descriptors_it_does_not_start(soft: int, hard: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    with pytest.raises(serve.TooFewDescriptors) as caught:
        serve.serve(GatewaySettings(redis_url="redis://127.0.0.1:1"))
    assert caught.value.exit_status == 2
    for number in (hard, OTHERS + 16, OTHERS + 4096, 4096):
        assert f" {number}" in str(caught.value)


ALLOWED = [
    (1024, 2**20, 4096, 4096),
    (1024, resource.RLIM_INFINITY, 4096, 4096),
    (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 4096, 4096),
    (2**20, 2**20, 4096, 4096),
    (1024, 1024, 4096, 1024 - OTHERS),
    (64, OTHERS + 16, 4096, 16),
    (64, OTHERS + 1, 1, 1),
]


@pytest.mark.parametrize(("soft", "hard", "wanted", "expected"), ALLOWED)
def test_there_are_as_many_connections_as_the_system_has_descriptors_for(
    soft: int, hard: int, wanted: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_to: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: set_to.append(limits))
    assert serve._descriptors_for(wanted) == expected
    assert set_to == ([(expected + OTHERS, hard)] if -1 < soft < expected + OTHERS else [])
