"""Checks for the manifests of deploy/kubernetes, both as written and as rendered by kustomize."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from penstock.gateway.settings import PREFIX, GatewaySettings
from penstock.worker.settings import Settings, variable
from tests.deploy.fleets import HAND_BACK_S
from tests.support.packages import ROOT

FOLDER = ROOT / "deploy/kubernetes"
SCHEMAS = {path.stem: json.loads(path.read_text()) for path in (Path(__file__).parent / "schemas").glob("*.json")}
KUSTOMIZE = {"Kustomization", "Component"}
GATEWAY = PREFIX
SETTINGS = {variable(name) for name in Settings.model_fields} | {
    GATEWAY + name.upper() for name in GatewaySettings.model_fields
}

Manifest = dict[str, Any]


def load(text: str) -> list[Manifest]:
    return [document for document in yaml.safe_load_all(text) if document]


def of_kind(manifests: Sequence[Manifest], *kinds: str) -> list[Manifest]:
    return [each for each in manifests if each["kind"] in kinds]


def pods(manifests: Sequence[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """Yields name and spec of all pods."""
    for each in of_kind(manifests, "Deployment", "StatefulSet"):
        yield each["metadata"]["name"], each["spec"]["template"]["spec"]
    for each in of_kind(manifests, "Pod"):
        yield each["metadata"]["name"], each["spec"]


def check_rights(manifests: Sequence[Manifest]) -> None:
    """Checks that pods follow the `restricted` standard and that nobody writes to their root filesystem."""
    for name, spec in pods(manifests):
        assert spec["securityContext"]["runAsNonRoot"] is True, name
        assert spec["securityContext"]["runAsUser"] > 0, name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert spec["automountServiceAccountToken"] is False, name
        assert spec["enableServiceLinks"] is False, name
        assert not spec.keys() & {"hostNetwork", "hostPID", "hostIPC"}, name
        for container in spec["containers"]:
            rights = container["securityContext"]
            assert rights["allowPrivilegeEscalation"] is False, name
            assert rights["readOnlyRootFilesystem"] is True, name
            assert rights["capabilities"] == {"drop": ["ALL"]}, name
            assert "memory" in container["resources"]["limits"], name
            assert container["resources"]["requests"].keys() == {"cpu", "memory"}, name
        assert not any("hostPath" in volume for volume in spec["volumes"]), name


def check_probes(manifests: Sequence[Manifest]) -> None:
    """Checks that each probe asks for a path the program has, at a named port, with a timeout no longer than its
    period.
    """
    for name, spec in pods(manifests):
        if name == "penstock-operator":
            continue
        for container in spec["containers"]:
            ports = {port["name"] for port in container["ports"]}
            for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
                probe = container[kind]
                if "httpGet" in probe:
                    assert probe["httpGet"]["port"] in ports - {"http"}, f"clients of {name} can fill that port"
                    assert probe["httpGet"]["path"] in {"/healthz", "/readyz", "/liveness", "/readiness"}, name
                else:
                    assert probe["exec"]["command"] == ["/etc/penstock/ping.sh"], name
            assert container["livenessProbe"].get("failureThreshold", 3) > 3, f"{name} is restarted too readily"


def check_secrets(manifests: Sequence[Manifest]) -> None:
    """Checks that secret values are references, and that no value looks like a URL with a password."""
    assert of_kind(manifests, "Secret") == []
    for name, spec in pods(manifests):
        for variable_ in (each for container in spec["containers"] for each in container.get("env", ())):
            if re.search(r"URL|PASSWORD|TOKEN|KEY$", variable_["name"]):
                assert variable_.keys() == {"name", "valueFrom"}, f"{name}: {variable_['name']}"
                assert variable_["valueFrom"].keys() == {"secretKeyRef"}, f"{name}: {variable_['name']}"
    settings = [value for each in of_kind(manifests, "ConfigMap") for value in each["data"].values()]
    assert not any(re.search(r"rediss?://[^ ]*:[^ ]*@", value) for value in settings)


def secrets_used(manifests: Sequence[Manifest]) -> set[tuple[str, str]]:
    """Returns the names of Secrets with the keys that are read of them; `*` where all are mounted."""
    used = set()
    for _, spec in pods(manifests):
        for container in spec["containers"]:
            for each in container.get("env", ()):
                reference = each.get("valueFrom", {}).get("secretKeyRef")
                if reference:
                    used.add((reference["name"], reference["key"]))
        for volume in spec["volumes"]:
            if "secret" in volume:
                items = volume["secret"].get("items")
                name = volume["secret"]["secretName"]
                used |= {(name, item["key"]) for item in items} if items else {(name, "*")}
    for each in of_kind(manifests, "TriggerAuthentication"):
        used |= {(reference["name"], reference["key"]) for reference in each["spec"]["secretTargetRef"]}
    return used


def check_settings(manifests: Sequence[Manifest]) -> None:
    """Checks that every PENSTOCK_* variable is a setting: an unknown one would end the program."""
    names = {
        each["name"]
        for name, spec in pods(manifests)
        for container in spec["containers"]
        for each in container.get("env", ())
    }
    names |= {name for each in of_kind(manifests, "ConfigMap") for name in each["data"]}
    names = {name for name in names if name.startswith("PENSTOCK_")}
    assert names
    assert names <= SETTINGS


def check_grace(manifests: Sequence[Manifest]) -> None:
    """Checks that a pod is killed only after its program has had time to drain and to hand back."""
    settings = {name: value for each in of_kind(manifests, "ConfigMap") for name, value in each["data"].items()}
    specs = dict(pods(manifests))
    worker = specs["penstock-worker"]["terminationGracePeriodSeconds"]
    assert worker >= float(settings[variable("drain_timeout_s")]) + HAND_BACK_S
    if "penstock-gateway" in specs:
        gateway = specs["penstock-gateway"]
        (command,) = [c["lifecycle"]["preStop"]["exec"]["command"] for c in gateway["containers"]]
        assert command[0] == "sleep"
        drain_s = float(settings[f"{GATEWAY}DRAIN_TIMEOUT_S"])
        assert gateway["terminationGracePeriodSeconds"] >= float(command[1]) + drain_s + HAND_BACK_S


def check_selectors(manifests: Sequence[Manifest]) -> None:
    """Checks that selectors match something, that each Deployment may lose one pod at a time, and that none has open
    doors.
    """
    labels = {
        each["metadata"]["name"]: each["spec"]["template"]["metadata"]["labels"]
        for each in of_kind(manifests, "Deployment", "StatefulSet")
    }
    selectors = [each["spec"]["selector"] for each in of_kind(manifests, "Service")]
    chosen = of_kind(manifests, "Deployment", "StatefulSet", "PodDisruptionBudget", "PodMonitor")
    selectors += [each["spec"]["selector"]["matchLabels"] for each in chosen]
    selectors += [each["spec"]["podSelector"]["matchLabels"] for each in of_kind(manifests, "NetworkPolicy")]
    for selector in selectors:
        assert any(selector.items() <= found.items() for found in labels.values()), selector
    budgets = {each["metadata"]["name"]: each["spec"] for each in of_kind(manifests, "PodDisruptionBudget")}
    for each in of_kind(manifests, "Deployment"):
        assert budgets[each["metadata"]["name"]]["maxUnavailable"] == 1
    policies = {each["metadata"]["name"]: each["spec"] for each in of_kind(manifests, "NetworkPolicy")}
    for name, spec in pods([each for each in manifests if each["kind"] != "Pod"]):
        assert set(policies[name]["policyTypes"]) == {"Ingress", "Egress"}
        opened = {port["port"] for rule in policies[name]["ingress"] for port in rule["ports"]}
        assert opened == {port["containerPort"] for container in spec["containers"] for port in container["ports"]}


def check_resources_of_others(manifests: Sequence[Manifest]) -> None:
    """Checks resources that Kubernetes itself does not know, by schemas of our own."""
    for each in manifests:
        schema = SCHEMAS.get(each["kind"].lower())
        if schema is not None:
            jsonschema.validate(each, schema)


CHECKS = (
    check_rights, check_probes, check_secrets, check_settings, check_grace, check_selectors, check_resources_of_others,
)  # fmt: skip
