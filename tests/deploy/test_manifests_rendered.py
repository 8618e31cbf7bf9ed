"""The manifests as kustomize renders them, checked offline by Kubernetes's own schemas. Run by `make manifests`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.manifests import CHECKS, FOLDER, SCHEMAS, Manifest, load, of_kind, pods

kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="needs the extra `deploy`: make manifests")
pytestmark = pytest.mark.manifests

OVERLAYS = ("cpu", "gpu", "tpu", "complete")
VERSIONS = [f"1.{minor}.0" for minor in range(30, 38)]
DEVICES = {"cpu": None, "gpu": "nvidia.com/gpu", "tpu": "google.com/tpu", "complete": None}


@cache
def rendered(folder: str) -> tuple[Manifest, ...]:
    kubectl = shutil.which("kubectl", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert kubectl is not None, "the extra `deploy` brings kubectl"
    command = [kubectl, "kustomize", str(FOLDER / folder)]
    return tuple(load(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("folder", [*(f"overlays/{name}" for name in OVERLAYS), "operator"])
def test_kubernetes_knows_every_field(folder: str, version: str) -> None:
    others = {"ScaledObject", "TriggerAuthentication", "PodMonitor"}
    assert {kind.lower() for kind in others} == SCHEMAS.keys()
    known = [each for each in rendered(folder) if each["kind"] not in others]
    assert known
    for each in known:
        kubernetes_validate.validate(each, version, strict=True)


def test_a_misspelt_field_is_noticed() -> None:
    (worker,) = [
        each
        for each in rendered("overlays/cpu")
        if each["metadata"]["name"] == "penstock-worker" and each["kind"] == "Deployment"
    ]
    spec: dict[str, Any] = worker["spec"]["template"]["spec"]
    wrong = {**spec, "terminationGracePeriodSecond": 150}
    broken = {**worker, "spec": {**worker["spec"], "template": {**worker["spec"]["template"], "spec": wrong}}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, VERSIONS[-1], strict=True)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_must_hold_holds_of_what_is_applied(overlay: str, check: Callable[[list[Manifest]], None]) -> None:
    check(list(rendered(f"overlays/{overlay}")))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_each_overlay_has_its_image_and_its_device(overlay: str) -> None:
    specs = dict(pods(rendered(f"overlays/{overlay}")))
    (worker,) = specs["penstock-worker"]["containers"]
    devices = worker["resources"]["limits"].keys() - {"cpu", "memory"}
    assert devices == ({DEVICES[overlay]} if DEVICES[overlay] else set())
    assert worker["image"] == {"gpu": "penstock:cuda", "tpu": "penstock:tpu"}.get(overlay, "penstock:latest")
    assert all(":" in container["image"] for spec in specs.values() for container in spec["containers"])


def test_a_slice_of_one_host_is_one_copy_of_the_model_on_all_its_chips() -> None:
    manifests = rendered("overlays/tpu")
    (settings,) = [each["data"] for each in of_kind(manifests, "ConfigMap") if "PENSTOCK_MODEL" in each["data"]]
    (worker,) = dict(pods(manifests))["penstock-worker"]["containers"]
    assert settings["PENSTOCK_TENSOR_PARALLEL"] == worker["resources"]["limits"]["google.com/tpu"]


@pytest.mark.parametrize("overlay", ["gpu", "tpu"])
def test_where_devices_are_scarce_an_old_worker_goes_first(overlay: str) -> None:
    for each in of_kind(rendered(f"overlays/{overlay}"), "Deployment"):
        expected = (
            {"maxSurge": 0, "maxUnavailable": 1}
            if each["metadata"]["name"] == "penstock-worker"
            else {"maxSurge": 1, "maxUnavailable": 0}
        )
        assert each["spec"]["strategy"]["rollingUpdate"] == expected


def test_another_setting_is_another_configmap() -> None:
    for overlay in ("cpu", "tpu"):
        manifests = rendered(f"overlays/{overlay}")
        names = {each["metadata"]["name"] for each in of_kind(manifests, "ConfigMap")}
        used = {
            reference["configMapRef"]["name"]
            for _, spec in pods(manifests)
            for container in spec["containers"]
            for reference in container["envFrom"]
        }
        assert used == names
    cpu, tpu = (of_kind(rendered(f"overlays/{overlay}"), "ConfigMap") for overlay in ("cpu", "tpu"))
    assert {each["metadata"]["name"] for each in cpu} != {each["metadata"]["name"] for each in tpu}
