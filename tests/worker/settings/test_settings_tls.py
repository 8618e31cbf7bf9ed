"""TLS files of settings and URLs are checked before they are used, and errors are named."""

from __future__ import annotations

import os
import ssl
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast
from unittest import mock
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.cli.shared.errors import exit_status_of
from penstock.cli.shared.programs import GATEWAY, PROGRAMS
from penstock.gateway.serve import WrongCertificate, serve
from penstock.producer import AsyncClient, BadAddress, Client
from penstock.protocol.redis.pem import MAX_BYTES
from penstock.serving.http.certificate import certificate_of
from penstock.worker.settings import WORKER
from penstock.worker.settings_loading import Program, SettingsError, load
from tests.support.programs.gateway_harness import Certificate

Write = Callable[[Path], object]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with two pairs, `own` and `other`, and the key of the first behind a password."""
    folder = tmp_path_factory.mktemp("tls")
    for name in ("own", "other"):
        (folder / name).mkdir()
        Certificate.made_in(folder / name)
    command = "openssl ec -aes256 -passout pass:x -in own/key.pem -out encrypted.pem"
    subprocess.run(command.split(), check=True, capture_output=True, cwd=folder)
    command = "openssl pkcs8 -topk8 -passout pass:x -in own/key.pem -out encrypted8.pem"
    subprocess.run(command.split(), check=True, capture_output=True, cwd=folder)
    return folder


BEGIN = 60
"""Number of bytes of a file, after its first line."""


def _make_huge(path: Path) -> None:
    path.touch()
    os.truncate(path, MAX_BYTES + 1)


def harms(folder: Path, kind: str) -> Mapping[str, bytes | Write]:
    """Returns replacements of a file, `cert` or `key`, that nobody can use."""
    own, other = ((folder / of / f"{kind}.pem").read_bytes() for of in ("own", "other"))
    swapped = (folder / "own" / ("key.pem" if kind == "cert" else "cert.pem")).read_bytes()
    of_keys = {each: (folder / f"{each}.pem").read_bytes() for each in ("encrypted", "encrypted8")}
    return {
        "missing": lambda path: None,
        "a folder": lambda path: path.mkdir(),
        "a link to nothing": lambda path: path.symlink_to(path.with_suffix(".gone")),
        "a link to itself": lambda path: path.symlink_to(path),
        "a pipe": os.mkfifo,
        "a device": lambda path: path.symlink_to("/dev/zero"),
        "huge": _make_huge,
        "empty": b"",
        "blank": b" \r\n\n",
        "junk": b"no certificate",
        "zeros": bytes(4096),
        "utf-16": own.decode().encode("utf-16"),
        "swapped": swapped,
        "half": own[: len(own) // 2],
        "damaged": own[:BEGIN] + b"!!!!" + own[BEGIN + 4 :],
        "lines of an old Mac": own.replace(b"\n", b"\r"),
        "as one line": own.replace(b"\n", b"\\n"),
        "indented": b"  " + own.replace(b"\n", b"\n  "),
        "in quotes": b'"' + own.strip() + b'"',
        **({} if kind == "key" else {
            "der": ssl.PEM_cert_to_DER_cert(own.decode()),
            "half of a second": own + other[: len(other) // 2],
            "a damaged second": own + other[:BEGIN] + b"!!!!" + other[BEGIN + 4 :],
        }),
        **({} if kind == "cert" else {**of_keys, "another's before it": other + own}),
    }  # fmt: skip


def pairless(folder: Path, kind: str) -> Mapping[str, bytes | Write]:
    """Returns replacements that are files of this kind, but not of the pair."""
    own, other = ((folder / of / f"{kind}.pem").read_bytes() for of in ("own", "other"))
    return {"another's": other, **({"in the wrong order": other + own} if kind == "cert" else {})}


def forms(folder: Path, kind: str) -> Mapping[str, bytes | Write]:
    """Returns replacements that are as good."""
    own, other = ((folder / of / f"{kind}.pem").read_bytes() for of in ("own", "other"))
    return {
        "own": own,
        "lines of Windows": own.replace(b"\n", b"\r\n"),
        "no end of line": own.rstrip(),
        "a comment": b"# of whom it is\n" + own,
        "trailing junk": own + b"junk\xff\0",
        "a link": lambda path: path.symlink_to(folder / "own" / f"{kind}.pem"),
        **({"with others after it": own + other} if kind == "cert" else {}),
    }


@pytest.fixture
def place(tmp_path: Path) -> Callable[[str, bytes | Write], Path]:
    """Returns a function that replaces a file by something else."""

    def put(name: str, content: bytes | Write) -> Path:
        path = tmp_path / f"{name}.pem"
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        path.unlink(missing_ok=True)
        path.write_bytes(content) if isinstance(content, bytes) else content(path)
        return path

    return put


Place = Callable[[str, bytes | Write], Path]


def url_of(**files: Path) -> str:
    return "rediss://user:secret@h:1/0?" + "&".join(f"{name}={quote(str(path))}" for name, path in files.items())


@contextmanager
def set_to(
    program: Program[Any], at: int, values: Mapping[str, str], tmp_path: Path
) -> Iterator[tuple[Any, list[str]]]:
    """Sets the values as flags, in the environment or in a file; gives the places that a message names."""
    file = tmp_path / "some.toml"
    head, table = ("", "") if program.table is None else (f"[{program.table}]\n", f"[{program.table}] of ")
    if at == 0:
        yield (values, None), [f"--{name.replace('_', '-')}" for name in values]
    elif at == 1:
        variables = {program.variable(name): value for name, value in values.items()}
        with mock.patch.dict(os.environ, variables):
            yield ({}, None), list(variables)
    else:
        file.write_text(head + "".join(f"{name} = '{value}'\n" for name, value in values.items()))
        yield ({}, file), [f"{name} in {table}{file}" for name in values]


def refusals(url: str, files: list[Path], tmp_path: Path, at: int) -> None:
    """Checks that worker, gateway and both clients refuse the URL, each before it does anything."""
    for program, name in ((WORKER, "redis_url"), (GATEWAY, "redis_url"), (GATEWAY, "operator_redis_url")):
        with set_to(program, at, {name: url}, tmp_path) as ((flags, config), places):
            with pytest.raises(SettingsError) as caught:
                load(cast("Program[Any]", program), PROGRAMS, flags, config)
            assert str(caught.value).startswith(f"{places[0]}: ssl_")
            assert exit_status_of(caught.value) == 2
        check_told(caught.value, files)
    for client in (AsyncClient, Client):
        with pytest.raises(BadAddress) as refused:
            client(url)
        check_told(refused.value, files)
        with mock.patch.dict(os.environ, {"REDIS_URL": url}), pytest.raises(BadAddress, match=r"^REDIS_URL: ssl_"):
            client()


def check_told(error: Exception, files: list[Path]) -> None:
    message = str(error)
    assert all(str(path) in message for path in files), message
    assert message.isprintable()
    assert len(message) < 1000
    assert "secret" not in message


def test_files_of_redis_that_nobody_can_use(folder: Path, tmp_path: Path, place: Place) -> None:
    own = {kind: folder / "own" / f"{kind}.pem" for kind in ("cert", "key")}
    at = 0
    for content in harms(folder, "cert").values():
        authorities = place("ca", content)
        refusals(url_of(ssl_ca_certs=authorities), [authorities], tmp_path, at := (at + 1) % 3)
    for content in {**harms(folder, "cert"), **pairless(folder, "cert")}.values():
        pair = {"ssl_certfile": place("cert", content), "ssl_keyfile": own["key"]}
        refusals(url_of(**pair), [*pair.values()], tmp_path, at := (at + 1) % 3)
    for content in {**harms(folder, "key"), **pairless(folder, "key")}.values():
        pair = {"ssl_certfile": own["cert"], "ssl_keyfile": place("key", content)}
        refusals(url_of(**pair), [*pair.values()], tmp_path, at := (at + 1) % 3)
    refusals(url_of(ssl_certfile=own["cert"]), [own["cert"]], tmp_path, 0)  # it has no key in it


def test_the_pair_of_a_gateway_that_nobody_can_use(folder: Path, tmp_path: Path, place: Place) -> None:
    own = {kind: folder / "own" / f"{kind}.pem" for kind in ("cert", "key")}
    cases = [(place, "cert", each) for each in {**harms(folder, "cert"), **pairless(folder, "cert")}.values()]
    cases += [(place, "key", each) for each in {**harms(folder, "key"), **pairless(folder, "key")}.values()]
    for at, (put, kind, content) in enumerate(cases):
        files = own | {kind: put(kind, content)}
        values = {"tls_certificate": str(files["cert"]), "tls_key": str(files["key"])}
        with set_to(GATEWAY, at % 3, values, tmp_path) as ((flags, config), places):
            found = load(GATEWAY, PROGRAMS, flags, config)
            with pytest.raises(WrongCertificate) as refused:
                serve(found)
        assert str(refused.value).startswith(", ".join(places) + ": tls_certificate ")
        assert refused.value.exit_status == 2
        check_told(refused.value, list(files.values()))


def test_other_forms_are_as_good(folder: Path, place: Place) -> None:
    for form in forms(folder, "cert").values():
        for key in forms(folder, "key").values():
            files = place("cert", form), place("key", key)
            url = url_of(ssl_ca_certs=files[0], ssl_certfile=files[0], ssl_keyfile=files[1])
            assert load(WORKER, PROGRAMS, {"redis_url": url}).redis_url == url
            assert certificate_of(*files) is not None
    both = place("both", b"".join((folder / "own" / f"{kind}.pem").read_bytes() for kind in ("key", "cert")))
    assert load(WORKER, PROGRAMS, {"redis_url": url_of(ssl_certfile=both)})
    assert certificate_of(both, both) is not None


@pytest.mark.parametrize("option", ["ssl_ca_certs", "ssl_certfile", "ssl_keyfile"])
def test_an_empty_name_is_no_file(option: str) -> None:
    with pytest.raises(BadAddress, match=f"'{option}' in the Redis URL is empty"):
        AsyncClient(f"rediss://h?{option}=")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(
    start=st.integers(0, 400),
    length=st.integers(0, 400),
    junk=st.binary(max_size=40),
    kind=st.sampled_from(["cert", "key"]),
)
def test_a_file_with_any_bytes_in_it_is_used_or_refused_by_name(
    folder: Path, place: Place, start: int, length: int, junk: bytes, kind: str
) -> None:
    files = {each: folder / "own" / f"{each}.pem" for each in ("cert", "key")}
    whole = files[kind].read_bytes()
    files[kind] = place(kind, whole[:start] + junk + whole[start + length :])
    try:
        certificate_of(files["cert"], files["key"])
        usable = True
    except (OSError, ValueError):
        usable = False
    try:
        load(WORKER, PROGRAMS, {"redis_url": url_of(ssl_certfile=files["cert"], ssl_keyfile=files["key"])})
    except SettingsError as error:
        assert not usable
        check_told(error, list(files.values()))
    else:
        assert usable
