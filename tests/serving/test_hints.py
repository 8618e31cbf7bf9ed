from __future__ import annotations

import pytest
from redis import exceptions

from penstock.protocol.redis.faults import is_refused, may_pass
from penstock.serving.hints import ROLES, hint_for, public_reason

NO_NODE = "Redis Cluster cannot be connected. Please provide at least one reachable node: "


@pytest.mark.parametrize(
    ("error", "is_final", "words"),
    [
        (exceptions.AuthenticationError("invalid username-password pair or user is disabled."), True, "check user and"),
        (exceptions.AuthenticationError("Authentication required."), True, "the server wants a password"),
        (exceptions.ResponseError("AUTH <password> called without any password configured for the default user."),
         True, "the server wants no password"),
        (exceptions.NoPermissionError("User x has no permissions to run the 'eval' command"), True, ROLES),
        (exceptions.ResponseError("ACL failure in script: User x has no permissions"), True, ROLES),
        (exceptions.ConnectionError("Error 111 connecting to h:1."), False, "start it with redis-server"),
        (exceptions.RedisClusterException(NO_NODE + "Error 111 connecting to h:1."), False, "start it with"),
        (exceptions.RedisClusterException(NO_NODE + "invalid username-password pair"), True, "check user and password"),
        (exceptions.BusyLoadingError("LOADING Redis is loading the dataset"), False, "wait"),
        (exceptions.ResponseError("WRONGTYPE Operation against a key"), False, "penstock doctor"),
    ],
)  # fmt: skip
def test_an_error_says_what_to_do_and_whether_trying_again_helps(error: Exception, is_final: bool, words: str) -> None:
    assert words in hint_for(error)
    assert is_refused(error) is is_final
    assert not (is_final and may_pass(error))


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (exceptions.ConnectionError("Error 111 connecting to secret-host:1."), "no connection to Redis"),
        (exceptions.TimeoutError("Timeout reading from secret-host:1"), "no connection to Redis"),
        (exceptions.BusyLoadingError("loading the dataset"), "Redis is not available: loading the dataset"),
        (exceptions.OutOfMemoryError("command not allowed"), "Redis is not available: command not allowed"),
    ],
)
def test_whoever_asks_the_health_port_is_told_no_address(error: Exception, reason: str) -> None:
    assert public_reason(error) == reason
