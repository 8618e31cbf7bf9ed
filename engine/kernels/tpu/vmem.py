"""How much VMEM a kernel may take."""

from __future__ import annotations

VMEM_BYTES = 56 * 2**20
"""The most that a kernel holds at a time: of 64 MiB on TPU7x, of 128 MiB before it. No block is as large as that would
allow, because larger ones gain nothing (docs/tpu-kernels.md).
"""
