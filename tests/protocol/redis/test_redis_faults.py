"""An error means the same whatever it came wrapped in; one file alone looks at codes and texts."""

from __future__ import annotations

import ast
import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from pathlib import Path

import pytest
from hiredis import ReplyError
from redis import exceptions
from redis._parsers.base import BaseParser
from redis.asyncio.client import Pipeline

import penstock.producer
from penstock.protocol.errors import ConnectionLost, ServerRefused
from penstock.protocol.redis.address import parse_url
from penstock.protocol.redis.connection import RedisClient, connect, make_group, redis_errors
from penstock.protocol.redis.faults import Meaning, is_refused, may_pass, meaning_of
from tests.support.packages import PACKAGES
from tests.support.redis_servers.refusing_proxy import FULL, PASSING, REFUSED, RefusingProxy

# As servers send them.
ANSWERS = {
    "NOREPLICAS Not enough good replicas to write.": Meaning.ELSEWHERE,
    "MISCONF Errors writing to the AOF file: No space left on device": Meaning.LATER,
    "BUSY Valkey is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.": Meaning.LATER,
    "OOM command not allowed when used memory > 'maxmemory'.": Meaning.LATER,
    "READONLY You can't write against a read only replica.": Meaning.ELSEWHERE,
    "LOADING Redis is loading the dataset in memory": Meaning.LOADING,
    "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.": Meaning.ELSEWHERE,
    "CLUSTERDOWN The cluster is down": Meaning.LATER,
    "TRYAGAIN Multiple keys request during rehashing of slot": Meaning.LATER,
    "FAILOVER in progress": Meaning.LATER,
    "UNBLOCKED force unblock from blocking operation, instance state changed (master -> replica?)": Meaning.ELSEWHERE,
    "NOMASTERLINK Can't SYNC while not connected with my master": Meaning.LATER,
    "NOGOODSLAVE No suitable replica to promote": Meaning.LATER,
    "NOTBUSY No scripts in execution right now.": Meaning.LATER,
    "MOVED 3999 127.0.0.1:6381": Meaning.AWAY,
    "ASK 3999 127.0.0.1:6381": Meaning.AWAY,
    "ERR WAITAOF cannot be used with replica instances. Please also note that writes to replicas are just local": (
        Meaning.ELSEWHERE
    ),
    "ERR max number of clients reached": Meaning.LATER,
    "ERR max number of clients + cluster connections reached": Meaning.LATER,
    "ERR Script attempted to access a non local key in a cluster node": Meaning.LATER,
    "NOSCRIPT No matching script.": Meaning.NO_SCRIPT,
    "NOGROUP No such key 'k' or consumer group 'g' in XREADGROUP with GROUP option": Meaning.NO_GROUP,
    "ERR no such key": Meaning.NO_GROUP,
    "BUSYGROUP Consumer Group name already exists": Meaning.GROUP_EXISTS,
    "ERR The ID specified in XADD is equal or smaller than the target stream top item": Meaning.STALE_ID,
    "NOPERM User x has no permissions to run the 'eval' command": Meaning.NOT_PERMITTED,
    "ERR ACL failure in script: User x has no permissions to run the 'set' command": Meaning.NOT_PERMITTED,
    "ERR The user executing the script can't run this command or subcommand": Meaning.NOT_PERMITTED,
    "DENIED Redis is running in protected mode because protected mode is enabled": Meaning.NOT_PERMITTED,
    "WRONGPASS invalid username-password pair or user is disabled.": Meaning.WRONG_PASSWORD,
    "NOAUTH Authentication required.": Meaning.NO_PASSWORD,
    "ERR AUTH <password> called without any password configured for the default user. Are you sure your configuration "
    "is correct?": Meaning.NEEDLESS_PASSWORD,
    "WRONGTYPE Operation against a key holding the wrong kind of value": Meaning.JUNK,
    "ERR unknown command 'WAITAOF', with args beginning with: '1' 'OOM'": Meaning.UNKNOWN_COMMAND,
    "ERR unknown subcommand 'X'. Try XINFO HELP.": Meaning.UNKNOWN_COMMAND,
    "NOPROTO unsupported protocol version": Meaning.OTHER,
    "CROSSSLOT Keys in request don't hash to the same slot": Meaning.OTHER,
    "ERR user_script:3: attempt to compare nil with number": Meaning.JUNK,
    "ERR value is not an integer or out of range": Meaning.JUNK,
}  # fmt: skip
# What a caller sends must not be taken for what the server says.
MISLEADING = ("SET", "k) of pipeline caused error: ('NOPERM no", "NOREPLICAS")


def parsed(answer: str) -> Exception:
    error: Exception = BaseParser.parse_error(answer)
    return error


def in_pipeline(answer: str) -> Exception:
    error = parsed(answer)
    Pipeline.annotate_exception(None, error, 1, MISLEADING)  # type: ignore[arg-type]
    return error


def in_script(answer: str) -> Exception:
    if answer.startswith(("MOVED", "ASK")):  # no script is answered so
        return parsed(answer)
    return parsed(answer + " script: 4e6d8fc8bb01276962cce5371fa795a7763657ae, on @user_script:1.")


def in_transaction(answer: str) -> Exception:
    return parsed("EXECABORT Transaction discarded because of: " + answer.removeprefix("ERR "))


def in_transaction_of_pipeline(answer: str) -> Exception:
    error = in_transaction(answer)
    Pipeline.annotate_exception(None, error, 2, ("EXEC",))  # type: ignore[arg-type]
    return error


def in_cluster(answer: str) -> Exception:
    error = parsed(answer)
    words = "Redis Cluster cannot be connected. Please provide at least one reachable node: "
    wrapped = exceptions.RedisClusterException(words + str(error))
    wrapped.__cause__ = error
    return wrapped


def in_ours(answer: str) -> Exception:
    try:
        with redis_errors(parse_url("redis://h:1")):
            raise parsed(answer)
    except (ServerRefused, ConnectionLost) as error:
        return error


def in_group(answer: str) -> Exception:
    return ExceptionGroup("several", [ConnectionLost("gone"), ExceptionGroup("more", [in_pipeline(answer)])])


WRAPPINGS = (
    parsed, ReplyError, in_pipeline, in_script, in_transaction, in_transaction_of_pipeline, in_cluster, in_ours,
    in_group,
)  # fmt: skip


@pytest.mark.parametrize("wrap", WRAPPINGS, ids=lambda wrap: wrap.__name__)
async def test_every_answer_means_the_same_whatever_it_is_wrapped_in(wrap: Callable[[str], Exception]) -> None:
    assert {answer: meaning_of(wrap(answer)) for answer in ANSWERS} == ANSWERS
    assert set(ANSWERS.values()) == set(Meaning)  # a meaning that no answer has would be watched by nothing


def test_what_passes_and_what_is_refused_are_apart() -> None:
    for answer in ANSWERS:
        assert not (may_pass(parsed(answer)) and is_refused(parsed(answer)))


@pytest.mark.parametrize(
    ("error", "meaning"),
    [
        (TimeoutError(), Meaning.AWAY),
        (ConnectionRefusedError(111, "refused"), Meaning.AWAY),
        (exceptions.ClusterError("TTL exhausted."), Meaning.AWAY),
        (exceptions.AuthenticationError("whatever"), Meaning.WRONG_PASSWORD),
        (ServerRefused("x", is_passing=True), Meaning.LATER),
        (ServerRefused("x"), Meaning.OTHER),
        (ValueError("NOPERM is not an error of Redis"), Meaning.OTHER),
        (exceptions.DataError("Invalid input"), Meaning.OTHER),
    ],
    ids=repr,
)
def test_without_a_code_the_type_says_it(error: Exception, meaning: Meaning) -> None:
    assert meaning_of(error) is meaning


@pytest.fixture
async def refusing(redis: RedisClient) -> AsyncIterator[RedisClient]:
    """A server that lacks its replicas."""
    await redis.config_set("min-replicas-to-write", 1)
    yield redis
    await redis.config_set("min-replicas-to-write", 0)


@pytest.mark.every_server
async def test_a_real_server_s_refusal_passes_by_whatever_way_it_comes(refusing: RedisClient) -> None:
    for is_transaction in (False, True):
        pipeline = refusing.pipeline(transaction=is_transaction)
        pipeline.set("k", "v", nx=True)
        pipeline.pttl("k")
        with pytest.raises(exceptions.RedisError) as refused:
            await pipeline.execute()
        assert meaning_of(refused.value) is Meaning.ELSEWHERE
    with pytest.raises(exceptions.RedisError) as refused:
        await refusing.eval("return redis.call('SET', KEYS[1], 1)", 1, "k")
    assert meaning_of(refused.value) is Meaning.ELSEWHERE


async def test_each_code_is_known_through_the_library_s_own_ways(redis_url: str) -> None:
    expected = {**dict.fromkeys(PASSING.values(), True), FULL: True, **dict.fromkeys(REFUSED.values(), False)}
    async with RefusingProxy(redis_url) as proxy, aclosing(connect(proxy.url, decode=False, retries=0)) as client:
        pipelines = [client.pipeline(transaction=is_transaction) for is_transaction in (False, True)]
        for answer, passes in expected.items():
            proxy.refuse(answer)
            calls = [client.set("k", "v"), client.eval("return redis.call('GET', KEYS[1])", 1, "k")]
            errors = list(await asyncio.gather(*calls, return_exceptions=True))
            for pipeline in pipelines:
                pipeline.set("k", "v")
                pipeline.pttl("k")
                errors += await asyncio.gather(pipeline.execute(), return_exceptions=True)
            assert all(isinstance(error, Exception) for error in errors), answer
            assert [may_pass(error) for error in errors if isinstance(error, Exception)] == [passes] * 4, answer
            assert any(is_refused(error) for error in errors if isinstance(error, Exception)) is not passes, answer
        proxy.allow()
        assert await client.get("k") is None
        proxy.greeting = FULL
        proxy.cut()
        with pytest.raises(exceptions.RedisError) as refused:
            await client.get("k")
        assert may_pass(refused.value)


@pytest.mark.every_server
async def test_a_group_that_is_there_is_fine(redis: RedisClient) -> None:
    await make_group(redis, "s")
    await make_group(redis, "s")


@pytest.mark.every_server
async def test_a_needless_password_is_known_from_a_wrong_one(redis_url: str) -> None:
    found = []
    for login in (":x@", "nobody:x@"):
        async with aclosing(connect(redis_url.replace("//", f"//{login}"), decode=False)) as stranger:
            with pytest.raises(exceptions.RedisError) as refused:
                await stranger.ping()
        found.append(meaning_of(refused.value))
    assert found == [Meaning.NEEDLESS_PASSWORD, Meaning.WRONG_PASSWORD]


ROOT = Path(penstock.producer.__file__).parents[1]
JUDGE = ROOT / "protocol/redis/faults.py"
SEARCHES = {
    "startswith", "endswith", "find", "index", "match", "search", "fullmatch", "split", "partition", "removeprefix",
}  # fmt: skip


def caught(tree: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yields the names of errors with the code that may look at them: handlers, and functions that take an error."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and node.name:
            yield node.name, node
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for argument in node.args.args:
                if argument.annotation is not None and _is_error(ast.unparse(argument.annotation)):
                    yield argument.arg, node


def _is_error(annotation: str) -> bool:
    return annotation.endswith(("Error", "Exception")) or "Exception | " in annotation


def looks_at_text(name: str, code: ast.AST) -> Iterator[int]:
    """Yields the lines that compare or search the text, the code or the arguments of the error `name`."""
    for node in ast.walk(code):
        subjects: list[ast.AST] = []
        if isinstance(node, ast.Compare):
            subjects = [node.left, *node.comparators]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", None) in SEARCHES:
            subjects = [node.func.value, *node.args]  # type: ignore[attr-defined]
        for subject in subjects:
            if ast.unparse(subject).removesuffix(".lower()") in (
                f"str({name})", f"repr({name})", f"{name}.args", f"{name}.args[0]", f"{name}.status_code",
            ):  # fmt: skip
                yield node.lineno  # type: ignore[attr-defined]


def test_no_other_file_looks_at_an_error_s_text() -> None:
    found = [
        str(path.relative_to(ROOT))
        for package in PACKAGES
        if package != "engine"  # it knows nothing of Redis
        for path in sorted((ROOT / package).rglob("*.py"))
        if path != JUDGE
        for name, code in caught(ast.parse(path.read_text()))
        for _ in looks_at_text(name, code)
    ]
    assert found == ["local/embedded.py", "tools/plan/device/compiling.py"]  # errors of no connection: a start, and XLA
    probe = ast.parse("try: pass\nexcept OSError as e:\n  if 'x' in str(e) or e.args[0].startswith('y'): pass")
    assert [line for name, code in caught(probe) for line in looks_at_text(name, code)] == [3, 3]
