"""Checks a worker's packages here, and the devices it would run on."""

from __future__ import annotations

import importlib.metadata
import platform

from penstock.cli.checks import Finding
from penstock.cli.shared.errors import missing_worker_extra
from penstock.installed import how_to_install
from penstock.protocol.version import __version__

PACKAGES = ("redis", "pydantic", "jax", "flax", "transformers")


def check_packages() -> list[Finding]:
    """Lists the versions of what is installed, and checks the worker extra."""
    found = [f"penstock {__version__}"]
    for name in PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    versions = Finding("packages", "ok", ", ".join([f"Python {platform.python_version()}", *found]))
    missing = missing_worker_extra()
    if not missing:
        return [versions]
    detail = f"this install can send requests, but not serve a model: {', '.join(missing)} not found"
    return [versions, Finding("worker extra", "warn", detail, how_to_install("worker"))]


def check_compiler() -> Finding:
    """Checks that the C++ kernels for CPUs are here, or can be built. Imports jax."""
    from penstock.engine.kernels.cpu import NativeUnavailableError, find_compiler, kind_here, shipped_library

    kind = f"kernels for {kind_here()}"
    if (shipped := shipped_library()) is not None:
        return Finding("compiler", "ok", f"none is needed, the {kind} are there: {shipped.name}")
    try:
        return Finding("compiler", "ok", f"{find_compiler()}; {kind}")
    except NativeUnavailableError as error:
        detail = f"{error}: on a CPU a model runs several times as slow as it could"
    return Finding("compiler", "warn", detail, "install one: apt install g++, dnf install gcc-c++, or apk add g++")


def check_devices() -> Finding:
    """Lists the devices that jax would use. Imports jax, and holds an accelerator until the process ends."""
    import jax  # only where the worker extra is installed

    try:
        devices = jax.devices()
    except RuntimeError as error:
        return Finding("devices", "fail", f"jax finds no device: {error}", "check JAX_PLATFORMS and the driver")
    kinds = ", ".join(sorted({device.device_kind for device in devices}))
    detail = f"{len(devices)} x {devices[0].platform} ({kinds})"
    if devices[0].platform == "cpu":
        fix = f"for an accelerator: {how_to_install('worker,tpu')}, or with `cuda`"
        return Finding("devices", "ok", detail, fix)
    return Finding("devices", "ok", detail)
