"""The image, without Docker: its contents, by hash, and its lines of shell."""

from __future__ import annotations

import http.server
import json
import os
import re
import subprocess
import sys
import threading
import tomllib
from pathlib import Path

import pytest

from tests.support.packages import ROOT
from tests.support.patience import WAIT_S

DOCKERFILE = (ROOT / "Dockerfile").read_text()
BUILD, FINAL = DOCKERFILE.split("\nFROM ")[1:]
MAKEFILE = (ROOT / "Makefile").read_text()
EXTRAS = {
    image: extras.split(",")
    for line in re.findall(r"^IMAGES := (.*)$", MAKEFILE, re.MULTILINE)
    for image, _, extras in (pair.partition("=") for pair in line.split())
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LISTS = sorted((ROOT / "constraints").glob("image-*.txt"))
HASH = re.compile(r"    --hash=sha256:[0-9a-f]{64}")


def pins(path: Path) -> dict[str, str]:
    lines = (line.removesuffix(" \\") for line in path.read_text().splitlines())
    return dict(line.split("==") for line in lines if re.fullmatch(r"[a-z0-9-]+==[0-9][\w.]*", line))


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=; ]", requirement)[0].lower() for requirement in requirements}


def test_there_is_a_list_for_each_image_and_for_what_builds_them() -> None:
    assert {path.stem.removeprefix("image-") for path in LISTS} == {*EXTRAS, "build"}


@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.stem)
def test_each_package_is_pinned_with_hashes_and_no_place(path: Path) -> None:
    blocks = re.split(
        r"(?<=[^\\])\n(?=[a-z])", re.sub(r"^#.*\n|^ +#.*\n", "", path.read_text(), flags=re.MULTILINE).strip()
    )
    assert len(blocks) == len(pins(path)) > 0
    for block in blocks:
        _, *hashes = (line.removesuffix(" \\") for line in block.splitlines())
        assert hashes
        assert all(HASH.fullmatch(line) for line in hashes), block


@pytest.mark.parametrize("image", EXTRAS)
def test_an_image_holds_what_its_extras_need_in_the_versions_that_are_tested(image: str) -> None:
    held = pins(ROOT / f"constraints/image-{image}.txt")
    extras = PROJECT["optional-dependencies"]
    needed = names([*PROJECT["dependencies"], *(each for extra in EXTRAS[image] for each in extras[extra])])
    assert needed <= held.keys()
    tested = pins(ROOT / "constraints/py312.txt")
    assert {name: version for name, version in held.items() if tested.get(name, version) != version} == {}


def test_nothing_is_fetched_for_an_image_without_a_hash() -> None:
    installs = re.findall(r"/pip install ((?:[^&\\\n]|\\\n)*)", DOCKERFILE)
    assert len(installs) == 3
    assert all("--require-hashes" in options or "--no-index --no-deps" in options for options in installs)
    assert "/pip" not in FINAL


def test_the_kernels_are_built_for_cpus_and_no_compiler_is_left(tmp_path: Path) -> None:
    """Runs that shell line of the Dockerfile with programs that record their arguments."""
    instruction = re.search(r"^RUN (case (?:.*\\\n)*.*)$", BUILD, re.MULTILINE)
    assert instruction
    asked = tmp_path / "asked"
    (tmp_path / "apt-get").write_text(f'#!/bin/sh\necho apt-get "$@" >> {asked}\n')
    (tmp_path / "python").write_text(f'#!/bin/sh\necho python "$@" >> {asked}\n')
    for name in ("apt-get", "python"):
        (tmp_path / name).chmod(0o755)
    line = instruction[1].replace("/opt/penstock/bin/python", "python")
    for image in EXTRAS:
        asked.unlink(missing_ok=True)
        variables = {"IMAGE": image, "PATH": f"{tmp_path}:/usr/bin:/bin"}
        subprocess.run(["/bin/sh", "-ec", line], env=variables, check=True, timeout=WAIT_S)
        told = asked.read_text() if asked.exists() else ""
        assert ("install --yes --no-install-recommends g++" in told) is (image == "cpu")
        assert ("python -m penstock.engine.kernels.cpu" in told) is (image == "cpu")
    assert "apt-get" not in FINAL
    assert "COPY --from=build /opt/penstock /opt/penstock" in FINAL


def test_an_image_says_what_it_is() -> None:
    labels = dict(re.findall(r'org\.opencontainers\.image\.(\w+)="(.*?)"', FINAL))
    assert labels.keys() >= {"title", "description", "licenses", "documentation", "version", "revision", "created"}
    assert labels["licenses"] == PROJECT["license"]
    assert (ROOT / labels["documentation"]).exists()
    passed = set(re.findall(r"--build-arg (\w+)=", MAKEFILE))
    assert passed == set(re.findall(r"\$\{(\w+)\}", "".join(labels.values())))


def test_health_is_asked_at_the_port_that_is_set() -> None:
    """The image's own check finds a server at another port than the default."""
    command = re.search(r"^HEALTHCHECK .*\\\n    CMD (\[.*\])$", FINAL, re.MULTILINE)
    assert command
    program, *arguments = json.loads(command[1])
    assert program == "python"
    paths = []

    class Health(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            self.send_response(200 if len(paths) == 1 else 503)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Health) as server:
        threading.Thread(target=server.serve_forever).start()
        environment = {**os.environ, "PENSTOCK_HEALTH_PORT": str(server.server_port)}
        found = [
            subprocess.run([sys.executable, *arguments], env=environment, stderr=subprocess.DEVNULL).returncode
            for _ in range(2)
        ]
        server.shutdown()
    assert (found, paths) == ([0, 1], ["/readyz", "/readyz"])


def test_the_page_of_licences_is_of_what_the_images_hold() -> None:
    rows = re.findall(r"^\| (.+) \| (.+) \| (.+) \|$", (ROOT / "docs/licenses.md").read_text(), re.MULTILINE)[2:]
    sets = {"workers": ("cpu", "tpu", "cuda"), "all": ("cpu", "tpu", "cuda", "gateway")}
    listed = [
        (image, name)
        for _, images, names in rows
        for image in sets.get(images) or images.split(", ")
        for name in names.split(", ")
    ]
    held = [(image, name) for image in EXTRAS for name in pins(ROOT / f"constraints/image-{image}.txt")]
    assert sorted(listed) == sorted(held)
