"""Models in object stores, over the protocols that s3fs and gcsfs speak: moto stands in for S3, routes for GCS."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from tests.clients.environments import python_of, run

pytestmark = [pytest.mark.clients, pytest.mark.timeout(900)]

CONTENT = bytes(range(256)) * 20_000  # 5 MB: the store's client reads it in several pieces
FILES = {"m.gguf": CONTENT, "f/config.json": b"{}", "f/model.safetensors": CONTENT, "f/notes.bin": b"x"}
DIGEST = hashlib.sha256(CONTENT).hexdigest()

MOTO = """
import os, subprocess, sys
import boto3
from moto.server import ThreadedMotoServer

server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
server.start()
host, port = server.get_host_and_port()
os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{port}"
s3 = boto3.client("s3")
s3.create_bucket(Bucket="models")
for name in ("m.gguf", "f/config.json", "f/model.safetensors", "f/notes.bin"):
    s3.put_object(Bucket="models", Key=name, Body=open(os.path.join(sys.argv[1], name), "rb").read())
status = [subprocess.run([sys.executable, "-m", "penstock", "pull", name]).returncode for name in sys.argv[2:]]
server.stop()
sys.exit(max(status))
"""


class GcsServer(ThreadingHTTPServer):
    """Answers what gcsfs asks of the JSON API to list and read objects of the bucket `models`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), GcsRequest)
        self.ranges: list[str | None] = []

    def handle_error(self, *arguments: object) -> None:
        """Says nothing: a client that has seen enough hangs up."""


class GcsRequest(BaseHTTPRequestHandler):
    server: GcsServer

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        found = re.fullmatch(r"(?:/download)?/storage/v1/b/models/o(?:/(.+))?", parts.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        if found is None:
            self._say(404, {"error": {"code": 404, "message": "no such bucket"}})
        elif found[1] is None:
            prefix = query.get("prefix", "")
            self._say(200, {"items": [described(name) for name in FILES if name.startswith(prefix)]})
        elif (name := unquote(found[1])) not in FILES:
            self._say(404, {"error": {"code": 404, "message": f"no such object: models/{name}"}})
        elif query.get("alt") == "media":
            self._send(FILES[name])
        else:
            self._say(200, described(name))

    def _send(self, content: bytes) -> None:
        wanted = self.headers["Range"]
        self.server.ranges.append(wanted)
        first, last = map(int, re.findall(r"\d+", wanted)) if wanted else (0, len(content) - 1)
        body = content[first : last + 1]
        self.send_response(206 if wanted else 200)
        if wanted:
            self.send_header("Content-Range", f"bytes {first}-{first + len(body) - 1}/{len(content)}")
        self._end("application/octet-stream", body)

    def _say(self, status: int, document: dict[str, Any]) -> None:
        self.send_response(status)
        self._end("application/json", json.dumps(document).encode())

    def _end(self, media_type: str, body: bytes) -> None:
        self.send_header("Content-Type", media_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Says nothing."""


def described(name: str) -> dict[str, Any]:
    digest = base64.b64encode(hashlib.md5(FILES[name]).digest()).decode()
    return {
        "kind": "storage#object", "id": name, "bucket": "models", "name": name, "size": str(len(FILES[name])),
        "md5Hash": digest, "generation": "1", "etag": "e1", "contentType": "application/octet-stream",
        "timeCreated": "2026-01-02T03:04:05.000Z", "updated": "2026-01-02T03:04:05.000Z",
    }  # fmt: skip


@contextmanager
def gcs() -> Iterator[GcsServer]:
    with GcsServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def check(output: str) -> None:
    """Checks what was pulled: a file, and a folder without what is not part of a checkpoint."""
    file, folder = (Path(line) for line in output.splitlines() if line.startswith("/"))
    assert file.read_bytes() == CONTENT
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        "config.json": b"{}", "model.safetensors": CONTENT
    }  # fmt: skip


async def test_a_model_comes_from_s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ACCESS_KEY_ID": "k", "SECRET_ACCESS_KEY": "s", "DEFAULT_REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    script = tmp_path / "moto_run.py"
    script.write_text(MOTO)
    python = python_of("stores")
    status, output = await run(python, script, tmp_path, f"s3://models/m.gguf#sha256={DIGEST}", "s3://models/f")
    assert status == 0, output
    check(output)
    status, output = await run(python, script, tmp_path, "s3://models/none.gguf")
    assert status == 1
    assert "s3://models/none.gguf can't be fetched: FileNotFoundError" in output


async def test_a_model_comes_from_gcs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSSPEC_GS_TOKEN", "anon")
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # it asks by gRPC, for a minute, what a bucket is
    with gcs() as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{server.server_port}")
        pull = (python_of("stores"), "-m", "penstock", "pull")
        pulled = [await run(*pull, name) for name in (f"gs://models/m.gguf#sha256={DIGEST}", "gs://models/f")]
        assert [status for status, _ in pulled] == [0, 0], pulled
        check("".join(output for _, output in pulled))
        assert any(server.ranges), "read in pieces, so that it can go on"
        status, output = await run(*pull, "gs://models/none.gguf")
    assert status == 1
    assert "gs://models/none.gguf can't be fetched: FileNotFoundError" in output
