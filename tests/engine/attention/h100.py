"""Describes an H100 to XLA's compiler for CUDA, which then runs on the host alone."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

_NAME = "NVIDIA H100 80GB HBM3"
_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")

# Fields of XLA's GpuTargetConfigProto, with the figures of NVIDIA's data sheet for the H100 SXM.
_TARGET = f"""
gpu_device_info {{
  cuda_compute_capability {{ major: 9 }}
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  l2_cache_size: 52428800 device_memory_size: 84942979072 memory_bandwidth: 3352320000000
  device_vendor: "NVIDIA Corporation" device_address_bits: 64 name: "{_NAME}"
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{_NAME}"
"""


def devices(count: int = 1) -> Sequence[jax.Device]:
    """Returns H100 devices; none where JAX's CUDA plugin is not installed."""
    if not any(map(importlib.util.find_spec, _PLUGINS)):
        return ()
    try:
        return topologies.get_topology_desc(
            "h100", platform="cuda", target_config=_TARGET, topology=f"1x1x{count}"
        ).devices
    except NotImplementedError:  # installed, but the plugin found no CUDA libraries to go with it
        return ()


def abstract_mesh(*axes: str) -> AbstractMesh:
    """Returns a mesh of one H100 that is only described, with `axes` of size 1.

    Pallas' Triton backend looks there for the compute capability to lower for, and needs neither card nor plugin.
    """
    device = AbstractDevice(device_kind=_NAME, num_cores=132, platform="cuda")
    return AbstractMesh((1,) * len(axes), axes, axis_types=(AxisType.Auto,) * len(axes), abstract_device=device)
