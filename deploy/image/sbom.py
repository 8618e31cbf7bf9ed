"""Lists what each image contains: a CycloneDX bill of materials, and docs/licenses.md. `make sbom` runs it.

pip resolves `constraints/image-*.txt` like the Dockerfile, by hashes and for the image's Python. It installs nothing;
its report has each package's metadata.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

from penstock import __version__

ROOT = Path(__file__).parents[2]
WORKERS = ("cpu", "tpu", "cuda")
IMAGES = (*WORKERS, "gateway")
SETS = {WORKERS: "workers", IMAGES: "all"}  # sets of images that have a name on the page
PYTHON = "3.12"  # as in the Dockerfile
GLIBC_MINORS = range(17, 42)  # up to the base image's: wheels for them run in it

# Licences in metadata older than PEP 639, as SPDX expressions.
_SPDX = {
    "License :: OSI Approved :: Apache Software License": "Apache-2.0",
    "License :: OSI Approved :: BSD License": "BSD-3-Clause",
    "License :: OSI Approved :: ISC License (ISCL)": "ISC",
    "License :: OSI Approved :: MIT License": "MIT",
    "License :: OSI Approved :: Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "3-Clause BSD License": "BSD-3-Clause",
    "Apache 2.0 License": "Apache-2.0",
    "ISC License": "ISC",
    "MIT License": "MIT",
}
_EXPRESSION = re.compile(r"[A-Za-z0-9.+-]+( (AND|OR|WITH) [A-Za-z0-9.+-]+)*")


class NoLicense(Exception):
    """A package does not name its licence; the message names it."""


@dataclass(frozen=True, slots=True)
class Package:
    """A package in an image."""

    name: str
    version: str
    license: str  # an SPDX expression, or the package's own words
    sha256: str  # of the installed file


def packages_of(image: str) -> tuple[Package, ...]:
    """Returns the packages that pip would install into `image`, sorted by name."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        command = [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"),
            *("--dry-run", "--ignore-installed", "--require-hashes", "--no-deps", "--only-binary", ":all:"),
            *("--python-version", PYTHON, "--implementation", "cp", "--target", str(Path(scratch) / "none")),
            *(part for minor in GLIBC_MINORS for part in ("--platform", f"manylinux_2_{minor}_x86_64")),
            *("--platform", "manylinux2014_x86_64", "--report", str(report)),
            *("--requirement", str(ROOT / "constraints" / f"image-{image}.txt")),
        ]
        subprocess.run(command, check=True)  # noqa: S603 - pip, with options of our own
        found = json.loads(report.read_text())["install"]
    return tuple(sorted((_package(each) for each in found), key=lambda package: package.name))


def _package(installed: Mapping[str, Any]) -> Package:
    metadata = installed["metadata"]
    name = re.sub(r"[-_.]+", "-", metadata["name"]).lower()
    return Package(
        name, metadata["version"], license_of(metadata), installed["download_info"]["archive_info"]["hashes"]["sha256"]
    )


def license_of(metadata: Mapping[str, Any]) -> str:
    """Returns a package's licence: the expression of PEP 639, else a short `License` field, else a classifier.

    Raises:
        NoLicense: the metadata names no licence.
    """
    if expression := metadata.get("license_expression"):
        return str(expression)
    said = str(metadata.get("license") or "").strip()
    classified = [_SPDX.get(each, "") for each in metadata.get("classifier", ()) if each.startswith("License ::")]
    spelled = _SPDX.get(said, said)
    if _EXPRESSION.fullmatch(spelled):
        return spelled
    if any(classified):
        return " OR ".join(dict.fromkeys(filter(None, classified)))
    if said:
        return said.splitlines()[0][:80]
    raise NoLicense(f"{metadata['name']} {metadata['version']} does not say what its licence is")


def bill(image: str, packages: Sequence[Package]) -> str:
    """Writes the bill as CycloneDX 1.6, in JSON."""
    licenses = LicenseFactory()
    bom = Bom()
    bom.metadata.component = Component(name=f"penstock-{image}", version=__version__, type=ComponentType.CONTAINER)
    for package in packages:
        url = PackageURL("pypi", name=package.name, version=package.version)
        component = Component(
            name=package.name,
            version=package.version,
            type=ComponentType.LIBRARY,
            bom_ref=str(url),
            purl=url,
            hashes=[HashType(alg=HashAlgorithm.SHA_256, content=package.sha256)],
            licenses=[licenses.make_from_string(package.license)],
        )
        bom.components.add(component)
        bom.register_dependency(bom.metadata.component, [component])
    return JsonV1Dot6(bom).output_as_string(indent=2)


def license_page(packages: Mapping[str, Iterable[Package]]) -> str:
    """Writes docs/licenses.md: packages by licence and by the images that contain them. The bills have versions."""
    holders: dict[tuple[str, str], list[str]] = {}
    for image, held in packages.items():
        for package in held:
            holders.setdefault((package.license, package.name), []).append(image)
    rows: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (terms, name), images in sorted(holders.items()):
        rows.setdefault((terms, tuple(images)), []).append(name)
    lines = [
        "# Licences of what the images hold",
        "",
        "<!-- Written by `make sbom` from the packages' own metadata. -->",
        "",
        "Penstock itself is under Apache-2.0. Each package's licence text is in its `*.dist-info` folder in the image,",
        "its version in `constraints/image-*.txt`. An image also holds its base, `python:3.12-slim-trixie`: Debian",
        "(`/usr/share/doc/*/copyright`) and CPython. libtpu and NVIDIA's libraries are under their makers' own terms:",
        "read them before you pass such an image on. The images of workers are `cpu`, `tpu` and `cuda`; the other",
        "one is `gateway`.",
        "",
        "| licence | images | packages |",
        "| --- | --- | --- |",
    ]
    lines += [
        f"| {terms} | {SETS.get(images) or ', '.join(images)} | {', '.join(names)} |"
        for (terms, images), names in rows.items()
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="where the bills are written")
    directory: Path = parser.parse_args().directory
    directory.mkdir(parents=True, exist_ok=True)
    packages = {image: packages_of(image) for image in IMAGES}
    for image, held in packages.items():
        (directory / f"{image}.cdx.json").write_text(bill(image, held) + "\n")
    (ROOT / "docs" / "licenses.md").write_text(license_page(packages))


if __name__ == "__main__":
    main()
