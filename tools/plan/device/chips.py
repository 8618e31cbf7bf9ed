"""Data of TPU chips, per device as JAX counts them: a chip of v5e and v6e, half a chip of TPU7x."""

from __future__ import annotations

from dataclasses import dataclass

SOURCE = (
    "peak, HBM and its bandwidth, and chips of a host: Google Cloud's TPU documentation, pages v5e, v6e and TPU7x; "
    "interconnect per link and direction: J. Austin et al., How to Scale Your Model, 2025, and for TPU7x its page; HBM "
    "that a program can use: as libtpu's compiler states it when a program does not fit; matrix units: those pages, "
    "and libtpu's estimates of large matmuls"
)


@dataclass(frozen=True, slots=True)
class Chip:
    name: str
    hbm_bytes: int  # usable by a program
    hbm_bytes_per_s: float
    bf16_flops_per_s: float
    bf16_flops_per_cycle: int  # of all matrix units: each multiplies and adds a square of its size per cycle
    link_bytes_per_s: float  # of one interconnect link, one way
    hop_s: float = 1e-6
    devices_per_chip: int = 1
    chips_on_one_host: int = 8  # in the largest single-host slice; hosts of larger slices have HOST_CHIPS

    @property
    def clock_hz(self) -> float:
        """Clock of the cycles in the compiler's estimates."""
        return self.bf16_flops_per_s / self.bf16_flops_per_cycle

    def link_rate(self, num_devices: int) -> float:
        """Returns the bytes per second, one way, of a device's links to others of a replica of `num_devices`.

        Replicas are blocks of 2, 2 x 2 or 2 x 4 chips of one host. In the larger ones a ring
        runs around the edge, so each chip has two links. Two chips have one link between them. Devices of one chip
        count as if that one connected them.
        """
        return self.link_bytes_per_s * (1 if num_devices <= 2 * self.devices_per_chip else 2)

    def host_devices(self, num_devices: int) -> int:
        """Returns the devices per host in a slice of `num_devices`."""
        alone = self.chips_on_one_host * self.devices_per_chip
        return num_devices if num_devices <= alone else HOST_CHIPS * self.devices_per_chip


HOST_CHIPS = 4
_GIB = 2**30
# A device has four matrix units, of 128 x 128 on v5e and 256 x 256 on the others. Versions of v6e's page say two and
# four, and TPU7x's page says nothing. But for a matmul of 16,384 x 16,384 x 16,384 libtpu 0.0.42.1 expects 408,750 and
# 444,834 FLOPs a cycle, and two units have only 262,144. For v5e it expects 120,892 of 131,072. This gives clocks of
# 1.50, 1.75 and 2.20 GHz. For TPU7x libtpu itself seems to assume 1.90: its `optimal_seconds` correspond to 0.86 of the
# peak.
_OF_128, _OF_256 = 4 * 2 * 128**2, 4 * 2 * 256**2
CHIPS = {
    "v5e": Chip("v5e", int(15.75 * _GIB), 8.19e11, 1.97e14, _OF_128, 4.5e10),
    "v6e": Chip("v6e", int(31.24 * _GIB), 1.64e12, 9.18e14, _OF_256, 9.0e10),
    "tpu7x": Chip(
        "tpu7x", int(94.74 * _GIB), 3.69e12, 1.1535e15, _OF_256, 1.0e11, devices_per_chip=2, chips_on_one_host=4
    ),
}
