"""The manifests as written, without kustomize; `make manifests` renders them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.deploy.manifests import CHECKS, FOLDER, KUSTOMIZE, SCHEMAS, Manifest, load, of_kind, pods, secrets_used
from tests.support.packages import ROOT

FILES = sorted(path for path in FOLDER.rglob("*.yaml") if path.parent.parent.name != "overlays")


def written() -> list[Manifest]:
    """Returns all manifests of base, components and the operator's pod. A generator stands for the ConfigMap that it
    makes.
    """
    documents = [document for path in FILES for document in load(path.read_text())]
    settings = [
        {"kind": "ConfigMap", "data": dict(pair.split("=", 1) for pair in generator.get("literals", ()))}
        for each in of_kind(documents, *KUSTOMIZE)
        for generator in each.get("configMapGenerator", ())
    ]
    return [each for each in documents if each["kind"] not in KUSTOMIZE] + settings


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_what_must_hold(check: Callable[[list[Manifest]], None]) -> None:
    check(written())


def test_every_file_is_used() -> None:
    for folder in {path.parent for path in FOLDER.rglob("*.yaml")}:
        (kustomization,) = load((folder / "kustomization.yaml").read_text())
        named = {*kustomization.get("resources", ()), *(each.get("path") for each in kustomization.get("patches", ()))}
        assert {path.name for path in folder.glob("*.yaml")} - {"kustomization.yaml"} <= named
        for place in (*kustomization.get("resources", ()), *kustomization.get("components", ())):
            assert (folder / place).exists(), f"{folder}: {place}"


def test_a_rolling_update_never_takes_a_pod_before_another_is_ready() -> None:
    for each in of_kind(written(), "Deployment"):
        assert each["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}


def test_workers_can_be_scaled_by_others() -> None:
    """A number of replicas in a manifest would undo an autoscaler's at each apply."""
    (worker,) = [each for each in of_kind(written(), "Deployment") if each["metadata"]["name"] == "penstock-worker"]
    assert "replicas" not in worker["spec"]


@pytest.mark.parametrize("kind", SCHEMAS)
def test_the_schemas_are_strict(kind: str) -> None:
    (found, *_) = [each for each in written() if each["kind"].lower() == kind]
    jsonschema.validate(found, SCHEMAS[kind])
    with pytest.raises(jsonschema.ValidationError, match="unexpected"):
        jsonschema.validate({**found, "spec": {**found["spec"], "polingInterval": 5}}, SCHEMAS[kind])


def made_secrets(tmp_path: Path) -> dict[str, dict[str, str]]:
    """Runs secrets.sh with a kubectl that keeps what it gets; returns the secrets."""
    (tmp_path / "bin").mkdir(exist_ok=True)
    kubectl = tmp_path / "bin/kubectl"
    kubectl.write_text(f"""#!/bin/sh
echo "$@" >> {tmp_path}/asked
case "$3 $4" in
  "get secret") test -e {tmp_path}/secrets/$5 ;;
  "create secret") mkdir -p {tmp_path}/secrets && cp -r "${{7#--from-file=}}" {tmp_path}/secrets/$6 ;;
esac
""")
    kubectl.chmod(0o755)
    environment = {**os.environ, "PATH": f"{kubectl.parent}:{os.environ['PATH']}"}
    subprocess.run(["sh", FOLDER / "secrets.sh", "ours"], env=environment, check=True, capture_output=True)
    return {
        folder.name: {file.name: file.read_text() for file in folder.iterdir()}
        for folder in (tmp_path / "secrets").iterdir()
    }


def test_the_script_makes_every_secret_that_is_named_and_only_once(tmp_path: Path) -> None:
    made = made_secrets(tmp_path)
    for name, key in secrets_used(written()):
        assert made[name], name
        assert key == "*" or made[name][key].strip(), f"{name}: {key}"
    passwords = made["penstock-redis-passwords"]
    worker = made["penstock-redis-urls"]["worker"]
    assert worker == f"rediss://worker:{passwords['worker']}@penstock-redis:6379/0?ssl_ca_certs=/run/penstock/ca.crt"
    asked = (tmp_path / "asked").read_text()
    assert not any(password in asked for password in passwords.values())
    assert made_secrets(tmp_path) == made


def test_gateways_have_an_operator_s_url_beside_their_own() -> None:
    """The key is optional: with a Redis of one's own, the Secret may have none."""
    (gateway,) = [each for each in of_kind(written(), "Deployment") if each["metadata"]["name"] == "penstock-gateway"]
    (container,) = gateway["spec"]["template"]["spec"]["containers"]
    urls = {
        each["name"]: each["valueFrom"]["secretKeyRef"] for each in container["env"] if each["name"].endswith("URL")
    }
    secret = {"name": "penstock-redis-urls"}
    assert urls == {
        "PENSTOCK_GATEWAY_REDIS_URL": {**secret, "key": "gateway"},
        "PENSTOCK_GATEWAY_OPERATOR_REDIS_URL": {**secret, "key": "operator", "optional": True},
    }


def test_the_certificate_is_for_the_name_that_clients_use(tmp_path: Path) -> None:
    certificate = made_secrets(tmp_path)["penstock-redis-tls"]["tls.crt"]
    command = ["openssl", "x509", "-noout", "-ext", "subjectAltName"]
    told = subprocess.run(command, input=certificate, capture_output=True, text=True, check=True).stdout
    (service,) = [
        each for each in of_kind(written(), "Service") if each["metadata"]["name"] == "penstock-redis"
    ]  # fmt: skip
    for name in (service["metadata"]["name"], "penstock-redis.ours.svc"):
        assert f"DNS:{name}" in told


def test_redis_in_a_pod_starts_with_what_compose_starts_with() -> None:
    (generated,) = load((ROOT / "deploy/redis/kustomization.yaml").read_text())
    (files,) = [generator["files"] for generator in generated["configMapGenerator"]]
    assert all((ROOT / "deploy/redis" / name).is_file() for name in files)
    spec: dict[str, Any] = dict(pods(written()))["penstock-redis"]
    (container,) = spec["containers"]
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert {"/etc/penstock", "/run/penstock/passwords", "/run/penstock/tls", "/data", "/tmp"} == mounts
    options = container["args"]
    assert [options[options.index(name) + 1] for name in ("--appendonly", "--maxmemory-policy", "--dir")] == [
        "yes", "noeviction", "/data",
    ]  # fmt: skip
