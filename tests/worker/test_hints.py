from __future__ import annotations

import pytest
from redis import exceptions

from penstock.worker.protocol import faults
from penstock.worker.protocol.hints import ROLES, hint_for

NO_NODE = "Redis Cluster cannot be connected. Please provide at least one reachable node: "


@pytest.mark.parametrize(
    ("error", "is_final", "words"),
    [
        (exceptions.AuthenticationError("invalid username-password pair or user is disabled."), True, "check user and"),
        (exceptions.AuthenticationError("Authentication required."), True, "the server wants a password"),
        (exceptions.ResponseError("AUTH <password> called without any password configured for the default user."),
         False, "the server wants no password"),
        (exceptions.NoPermissionError("User x has no permissions to run the 'eval' command"), True, ROLES),
        (exceptions.ResponseError("ACL failure in script: User x has no permissions"), True, ROLES),
        (exceptions.ConnectionError("Error 111 connecting to h:1."), False, "start it with redis-server"),
        (exceptions.RedisClusterException(NO_NODE + "Error 111 connecting to h:1."), False, "start it with"),
        (exceptions.RedisClusterException(NO_NODE + "invalid username-password pair"), True, "check user and password"),
        (exceptions.ResponseError("WRONGTYPE Operation against a key"), False, "penstock doctor"),
    ],
)  # fmt: skip
def test_an_error_says_what_to_do_and_whether_trying_again_helps(error: Exception, is_final: bool, words: str) -> None:
    assert words in hint_for(error)
    assert faults.is_final(error) is is_final
    assert not (is_final and faults.is_passing(error))
