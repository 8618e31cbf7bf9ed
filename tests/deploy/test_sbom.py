"""The bill of materials of an image. Run by `make manifests`, which has the tools that write and check one."""

from __future__ import annotations

import importlib.util
import json
import sys
from types import ModuleType

import pytest

from tests.support.packages import ROOT

pytest.importorskip("cyclonedx", reason="needs the extra `deploy`: make manifests")
pytestmark = pytest.mark.manifests

APACHE, BSD, MIT = (f"License :: OSI Approved :: {name} License" for name in ("Apache Software", "BSD", "MIT"))


@pytest.fixture(scope="module")
def sbom() -> ModuleType:
    place = ROOT / "deploy/image/sbom.py"
    spec = importlib.util.spec_from_file_location("sbom", place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["sbom"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("metadata", "found"),
    [
        ({"license_expression": "MIT AND Zlib", "license": "other"}, "MIT AND Zlib"),
        ({"license": "Apache 2.0 License"}, "Apache-2.0"),
        ({"license": "Copyright of many people, and a long text", "classifier": [BSD]}, "BSD-3-Clause"),
        ({"classifier": [MIT, APACHE]}, "MIT OR Apache-2.0"),
        ({"license": "Some Terms of Service\nand more"}, "Some Terms of Service"),
    ],
)  # fmt: skip
def test_a_licence_is_read_from_what_a_package_says(sbom: ModuleType, metadata: dict[str, object], found: str) -> None:
    assert sbom.license_of({"name": "x", "version": "1", **metadata}) == found


def test_a_package_that_says_nothing_is_named(sbom: ModuleType) -> None:
    with pytest.raises(sbom.NoLicense, match="x 1 does not say"):
        sbom.license_of({"name": "x", "version": "1", "license": None, "classifier": []})


def test_the_bill_is_cyclonedx(sbom: ModuleType) -> None:
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    packages = (sbom.Package("a", "1.0", "MIT OR Apache-2.0", "0" * 64), sbom.Package("b", "2", "Terms of b", "1" * 64))
    text = sbom.bill("cpu", packages)
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    bill = json.loads(text)
    assert {each["purl"]: each["hashes"][0]["content"] for each in bill["components"]} == {
        "pkg:pypi/a@1.0": "0" * 64, "pkg:pypi/b@2": "1" * 64,
    }  # fmt: skip
    page = sbom.license_page({"cpu": packages, "gateway": packages[:1]})
    assert "| MIT OR Apache-2.0 | cpu, gateway | a |" in page
    assert "| Terms of b | cpu | b |" in page
