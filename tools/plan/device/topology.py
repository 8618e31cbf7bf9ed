"""Abstract devices of a TPU slice, from libtpu alone, for compiling ahead of time."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence

import jax

from penstock.engine.errors import ConfigError
from penstock.installed import how_to_install
from penstock.tools.plan.device.chips import CHIPS, Chip

EXAMPLES = ("v5e:2x2", "v5e:2x4", "v6e:2x2", "v6e:2x4", "tpu7x:2x2x1", "v5e:1x1")


_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",  # do not ask the cloud's metadata server which TPU this machine has
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # compiling touches no device, so another process may compile or serve too
}


def has_libtpu() -> bool:
    return importlib.util.find_spec("libtpu") is not None


def chip_of(topology: str) -> Chip:
    """Returns the chip that a topology such as `v6e:2x2` names.

    Raises:
        ConfigError: the chip is unknown.
    """
    chip = CHIPS.get(topology.partition(":")[0])
    if chip is None:
        raise ConfigError(f"topology {topology!r} names no known chip ({', '.join(CHIPS)}); give one as {EXAMPLES[2]}")
    return chip


def devices_of(topology: str) -> Sequence[jax.Device]:
    """Returns the devices of a topology. Raises ConfigError if libtpu is not installed or does not know it."""
    chip_of(topology)
    if not has_libtpu():
        raise ConfigError(
            "compiling for a TPU needs libtpu, which is not installed here (no TPU is needed): "
            + how_to_install("worker,tpu")
        )
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from jax.experimental import topologies  # after the environment is set

    is_one_chip = set(topology.partition(":")[2].split("x")) == {"1"}
    host = {"chips_per_host_bounds": (1, 1, 1)} if is_one_chip else {}  # by default a host has four
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=topology, **host).devices
    except Exception as error:  # libtpu's errors have no common type
        raise ConfigError(f"libtpu knows no topology {topology!r}, such as {', '.join(EXAMPLES)}: {error}") from error
