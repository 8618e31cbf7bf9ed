"""The address of Redis, read from a URL. Nothing here shows a password: not the repr, not an error, not `str()`."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal
from urllib.parse import parse_qsl, unquote

from penstock.protocol.errors import BadAddress
from penstock.protocol.redis.hosts import is_host
from penstock.protocol.redis.pem import check_certificates, check_pair

_Kind = Literal["single", "unix", "cluster", "sentinel"]

SCHEMES: Mapping[str, tuple[_Kind, bool]] = {
    "redis": ("single", False),
    "rediss": ("single", True),
    "unix": ("unix", False),
    "redis+cluster": ("cluster", False),
    "rediss+cluster": ("cluster", True),
    "redis+sentinel": ("sentinel", False),
    "rediss+sentinel": ("sentinel", True),
}
"""Maps schemes to (kind of deployment, whether it uses TLS)."""


@dataclass(frozen=True, slots=True)
class Address:
    """A parsed Redis URL.

    `hosts` holds one pair for a single server, the start nodes of a cluster, or the sentinels. `path` is set for a unix
    socket, `service` for Sentinel; there `tls` applies to the server and `sentinel_tls` to the sentinels. `options` are
    keyword arguments for the connection. `read_anew` returns the URL as currently set, for user and password of new
    connections; None: they do not change.
    """

    kind: _Kind
    hosts: tuple[tuple[str, int], ...] = ()
    path: str = ""
    db: int = 0
    tls: bool = False
    service: str = ""
    sentinel_tls: bool = False
    username: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    sentinel_username: str | None = field(default=None, repr=False)
    sentinel_password: str | None = field(default=None, repr=False)
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    read_anew: Callable[[], str] | None = field(default=None, repr=False, compare=False)

    def reading(self, read_anew: Callable[[], str] | None) -> Address:
        """Returns the same address with user and password that may change."""
        return replace(self, read_anew=read_anew)

    def __str__(self) -> str:
        """Returns the URL without user, password and options, for logs and error messages."""
        if self.kind == "unix":
            return f"unix://{self.path}" + (f"?db={self.db}" if self.db else "")
        scheme = next(name for name, value in SCHEMES.items() if value == (self.kind, self.tls))
        hosts = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.hosts)
        tail = {"single": f"/{self.db}", "sentinel": f"/{self.service}/{self.db}"}.get(self.kind, "")
        return f"{scheme}://{hosts}{tail}"


def parse_url(url: str) -> Address:
    """Reads one of

        redis://[user:password@]host[:port][/db]       rediss:// the same over TLS
        unix://[user:password@]/path/to.sock[?db=0]
        redis+cluster://[user:password@]host:port[,host2:port2...]
        redis+sentinel://[user:password@]sentinel:port[,...]/service[/db]

    with options after `?`: `db`, `protocol` (2 or 3), `username` and `password`; over TLS `ssl_ca_certs`,
    `ssl_certfile`, `ssl_keyfile`, `ssl_cert_reqs`, `ssl_check_hostname`; for Sentinel `sentinel_username`,
    `sentinel_password`, and `sentinel_tls` (true or false) if the sentinels differ from the server.

    Raises:
        BadAddress: naming what is wrong, but never quoting a part that may hold a secret.
    """
    url = url.strip()  # files and secrets end in a line break
    if not url.isprintable():
        raise BadAddress("the Redis URL has a control character in it, such as a line break")
    scheme, separator, rest = url.partition("://")
    if not separator or scheme.lower() not in SCHEMES:
        shown = repr(scheme) if separator else "none"
        raise BadAddress(f"the Redis URL has scheme {shown}, not one of {', '.join(SCHEMES)}")
    kind, tls = SCHEMES[scheme.lower()]
    rest, _, query = rest.partition("?")
    if "@" in query:
        raise BadAddress(f"an @ after the ? of the Redis URL: {_ESCAPE}")
    options = _options(query, kind, tls)
    if kind == "unix":
        userinfo, at, path = rest.rpartition("@")
        userinfo, path = (userinfo, path) if at else ("", rest)
        parts: dict[str, Any] = {"path": unquote(path)}
        if not parts["path"].startswith("/"):
            raise BadAddress("a unix:// URL needs an absolute path: unix:///path/to.sock")
        if not parts["path"].isprintable():
            raise BadAddress("the path in the Redis URL has a control character in it")
    else:
        authority, _, path = rest.partition("/")
        userinfo, _, hosts = authority.rpartition("@")
        parts = {"hosts": _hosts(hosts, 26379 if kind == "sentinel" else 6379), **_path(path, kind)}
    username, _, password = userinfo.partition(":")
    credentials = {"username": unquote(username) or None, "password": unquote(password) or None}
    named = {name: options.pop(name) for name in _OWN_FIELDS if name in options}
    named.setdefault("sentinel_tls", tls and kind == "sentinel")
    return Address(kind=kind, tls=tls, options=options, **{**credentials, **parts, **named})


_ESCAPE = "in a user, password or option the characters : / ? @ must be percent-encoded"
_OWN_FIELDS = ("db", "username", "password", "sentinel_username", "sentinel_password", "sentinel_tls")


def _hosts(text: str, default_port: int) -> tuple[tuple[str, int], ...]:
    """Splits `host:port,[::1]:port`. A password with an unescaped `/` or `?` ends up here, so nothing is quoted."""
    pairs = []
    for item in text.split(","):
        host, bracket, after = item.partition("]") if item.startswith("[") else ("", "", "")
        if bracket:
            host, port = host[1:], after.removeprefix(":")
        else:
            host, _, port = item.partition(":")
        if port and not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
            raise BadAddress(f"a port in the Redis URL is not a number from 1 to 65535: {_ESCAPE}")
        name = unquote(host) or "localhost"
        if not is_host(name):
            raise BadAddress(f"a host in the Redis URL is not valid: {_ESCAPE}")
        pairs.append((name, int(port) if port else default_port))
    return tuple(pairs)


def _path(path: str, kind: _Kind) -> dict[str, Any]:
    parts = [unquote(part) for part in path.split("/") if part]
    found: dict[str, Any] = {}
    if kind == "sentinel":
        if not parts:
            raise BadAddress("a Sentinel URL needs the name of the service: redis+sentinel://host:port/service")
        found["service"] = parts.pop(0)
        if not found["service"].isprintable():
            raise BadAddress("the service in the Redis URL has a control character in its name")
    if kind == "cluster" and parts and parts != ["0"]:
        raise BadAddress("Redis Cluster has database 0 only")
    if parts:
        if len(parts) > 1 or not _is_number(parts[0]):
            raise BadAddress(f"the database in the Redis URL is not a number below {10**_MOST_DIGITS}")
        found["db"] = int(parts[0])
    return found


def _options(query: str, kind: _Kind, tls: bool) -> dict[str, Any]:
    options: dict[str, Any] = {}
    pairs = parse_qsl(query, keep_blank_values=True)
    has_tls = tls or any(name == "sentinel_tls" and _as_ours(value) == "true" for name, value in pairs)
    for name, value in pairs:
        allowed = _ALLOWED_OPTIONS.get(name)
        if name.lower() in _ELSEWHERE:
            raise BadAddress(f"option {name!r} of the Redis URL is not for Penstock: {_ELSEWHERE[name.lower()]}")
        if allowed is None:
            raise BadAddress(f"the Redis URL has an unknown option {name!r}; known: {', '.join(_ALLOWED_OPTIONS)}")
        if name.startswith("ssl_") and not has_tls:
            raise BadAddress(f"option {name!r} needs a TLS scheme such as rediss://")
        if name.startswith("sentinel_") and kind != "sentinel":
            raise BadAddress(f"option {name!r} is for redis+sentinel:// and rediss+sentinel://")
        if name == "db" and kind == "cluster" and value != "0":
            raise BadAddress("Redis Cluster has database 0 only")
        if isinstance(allowed, tuple):
            choice = _as_ours(value)
            if choice not in allowed:
                raise BadAddress(f"option {name!r} in the Redis URL must be one of {', '.join(allowed)}")
            options[name] = _parsed_choice(name, choice)
        elif allowed is int:
            if not _is_number(value):
                raise BadAddress(f"option {name!r} in the Redis URL is not a number below {10**_MOST_DIGITS}")
            options[name] = int(value)
        else:
            options[name] = _file(name, value) if name.startswith("ssl_") else value
    return options


def _file(name: str, value: str) -> str:
    if not value:  # the library would use the system's authorities
        raise BadAddress(f"option {name!r} in the Redis URL is empty")
    if not value.isprintable():
        raise BadAddress(f"option {name!r} in the Redis URL has a control character in it")
    return value


_MOST_DIGITS = 9


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS


_ALLOWED_OPTIONS: Mapping[str, type | tuple[str, ...]] = {
    "db": int,
    "protocol": ("2", "3"),
    "username": str,
    "password": str,
    "ssl_ca_certs": str,
    "ssl_certfile": str,
    "ssl_keyfile": str,
    "ssl_cert_reqs": ("none", "optional", "required"),
    "ssl_check_hostname": ("true", "false"),
    "sentinel_username": str,
    "sentinel_password": str,
    "sentinel_tls": ("true", "false"),
}


_OWN_TIMES = "it sets its own times; reconnect_timeout_s and answer_timeout_s are the client's"
_OWN_CONNECTIONS = "it needs few connections, and opens them by itself"
_OWN_TRIES = "it tries again by itself"
_TLS = "write rediss:// for TLS"
_UNCHECKED = "write ssl_cert_reqs=none to trust any server"
_ONE_FILE = "give one file, as ssl_ca_certs"
_NO_TLS_DETAILS = "TLS is as Python's ssl and the system's OpenSSL have it"
_ELSEWHERE: Mapping[str, str] = {
    **dict.fromkeys(("socket_timeout", "socket_connect_timeout", "timeout", "health_check_interval"), _OWN_TIMES),
    **dict.fromkeys(("connect_timeout", "connecttimeout", "dial_timeout", "read_timeout", "write_timeout"), _OWN_TIMES),
    **dict.fromkeys(("pool_timeout", "idle_timeout", "idle_check_interval", "conn_max_idle_time"), _OWN_TIMES),
    **dict.fromkeys(("max_connections", "pool_size", "min_idle_conns", "single_connection_client"), _OWN_CONNECTIONS),
    **dict.fromkeys(("retry_on_timeout", "retry_on_error", "max_retries"), _OWN_TRIES),
    **dict.fromkeys(("encoding", "encoding_errors", "charset"), "it reads UTF-8"),
    "decode_responses": "it decodes by itself",
    "legacy_responses": "it decodes by itself",
    **dict.fromkeys(("client_name", "lib_name", "lib_version"), "it names its connections by itself"),
    "socket_keepalive": "it notices by itself that a connection is gone",
    "socket_keepalive_options": "it notices by itself that a connection is gone",
    "socket_read_size": "it chooses its own sizes",
    **dict.fromkeys(("ssl", "tls", "sslmode"), _TLS),
    **dict.fromkeys(("insecure", "skip_verify", "verify_mode"), _UNCHECKED),
    **dict.fromkeys(("ssl_ca_path", "ssl_ca_data"), _ONE_FILE),
    "ssl_password": "give a key that needs no password",
    **dict.fromkeys(("ssl_ciphers", "ssl_min_version", "ssl_include_verify_flags"), _NO_TLS_DETAILS),
    **dict.fromkeys(("ssl_exclude_verify_flags", "ssl_validate_ocsp", "ssl_validate_ocsp_stapled"), _NO_TLS_DETAILS),
    **dict.fromkeys(("ssl_ocsp_context", "ssl_ocsp_expected_cert"), _NO_TLS_DETAILS),
    **dict.fromkeys(("database", "virtual_host"), "write db"),
    "path": "write unix:///path/to.sock",
    "unix_socket_path": "write unix:///path/to.sock",
    **dict.fromkeys(("host", "port"), "they come before the ?"),
    **dict.fromkeys(("sentinelmasterid", "master_name", "service_name"), "write redis+sentinel://host:port/service"),
}
"""Maps options of other libraries' URLs to our hint."""

_SYNONYMS = {
    "cert_none": "none", "cert_optional": "optional", "cert_required": "required", "1": "true", "yes": "true",
    "0": "false", "no": "false",
}  # fmt: skip


def _as_ours(value: str) -> str:
    """Normalizes a choice that is written as in other libraries: `CERT_NONE`, `True`."""
    lower = value.lower()
    return _SYNONYMS.get(lower, lower)


def check_files(address: Address) -> None:
    """Passes if the files that a TLS connection needs exist, can be read, and match.

    Raises:
        BadAddress: naming the option and the file.
    """
    options = address.options
    authorities, certificate = options.get("ssl_ca_certs"), options.get("ssl_certfile")
    try:
        if authorities is not None:
            check_certificates(authorities)
            ssl.create_default_context(cafile=authorities)
    except (OSError, ValueError) as error:
        raise BadAddress(f"ssl_ca_certs {authorities} of the Redis URL cannot be used: {error}") from error
    key = options.get("ssl_keyfile")
    if certificate is None:
        if key is not None:
            raise BadAddress("ssl_keyfile of the Redis URL needs ssl_certfile too")
        return
    try:
        check_pair(certificate, key)
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(certificate, key, "")
    except (OSError, ValueError) as error:
        files = f"ssl_certfile {certificate}" + ("" if key is None else f" and ssl_keyfile {key}")
        raise BadAddress(f"{files} of the Redis URL cannot be used: {error}") from error


def _parsed_choice(name: str, value: str) -> object:
    if name == "protocol":
        return int(value)
    if name in ("ssl_check_hostname", "sentinel_tls"):
        return value == "true"
    return value
