"""The kinds of processors that the C++ kernels are made for, and which of them this machine is.

Kernels of two kinds may round differently. The kind follows from this table alone and never from a measurement at
start, so that machines of one kind choose alike.
"""

from __future__ import annotations

import ctypes
import functools
import platform
from dataclasses import dataclass

from penstock.engine.processors import cpu_facts


@dataclass(frozen=True, slots=True)
class ProcessorKind:
    """A kind of processor."""

    name: str
    flags: tuple[str, ...]
    features: frozenset[str]
    """Features by their names in Linux's /proc/cpuinfo. A processor that has all of them runs what `flags` build."""
    vendors: frozenset[str] = frozenset()
    """Vendors, named as there, on whose processors alone the kind is the quickest; empty: on all vendors'."""

    @property
    def has_tiles(self) -> bool:
        """Whether its kernels use AMX tiles."""
        return not _TILES.isdisjoint(self.features)

    @property
    def native_flags(self) -> tuple[str, ...]:
        """Flags for exactly this processor, except that bf16 products are summed as this kind sums them."""
        sums = tuple(flag for flag in self.flags if flag.startswith("-D"))
        has_dots = "avx512_bf16" in features() and _BF16 not in self.flags
        return ("-march=native", *sums, *(("-mno-avx512bf16",) if has_dots else ()))


_V3 = frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})  # x86-64-v3 of the x86-64 psABI
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_X86_V4, _X86_V3 = "-march=x86-64-v4", "-march=x86-64-v3"
_VNNI, _VBMI, _BF16 = "-mavx512vnni", "-mavx512vbmi", "-mavx512bf16"
_TILES = frozenset({"amx_tile", "amx_bf16", "amx_int8"})

# Rates of bf16 products on one core of a Xeon with AMX (2-core VM, 3.7 GHz), from registers: TDPBF16PS 3,730 GFLOP/s,
# FMA on unpacked f32 237, VDPBF16PS 118. On Zen 4 and later VDPBF16PS has twice the rate of FMA. Hence VDPBF16PS is
# for AMD, and Intel's processors without AMX take the kind below it, which unpacks.
TARGETS: dict[str, tuple[ProcessorKind, ...]] = {
    "x86_64": (
        ProcessorKind(
            "amx", (_X86_V4, _VNNI, _VBMI, "-DPENSTOCK_TILES=1"), _V4 | _TILES | {"avx512_vnni", "avx512vbmi"}
        ),  # Sapphire Rapids
        ProcessorKind(
            "avx512-bf16",
            (_X86_V4, _VNNI, _VBMI, _BF16),
            _V4 | {"avx512_vnni", "avx512vbmi", "avx512_bf16"},
            frozenset({"AuthenticAMD"}),
        ),  # Zen 4
        ProcessorKind("avx512-vbmi", (_X86_V4, _VNNI, _VBMI), _V4 | {"avx512_vnni", "avx512vbmi"}),  # Ice Lake
        ProcessorKind("avx512-vnni", (_X86_V4, _VNNI), _V4 | {"avx512_vnni"}),  # Cascade Lake, Cooper Lake
        ProcessorKind("avx512", (_X86_V4,), _V4),  # Skylake-SP
        ProcessorKind("avx-vnni", (_X86_V3, "-mavxvnni"), _V3 | {"avx_vnni"}),  # Alder Lake
        ProcessorKind("avx2", (_X86_V3,), _V3),  # Haswell, Zen 1 to 3
        ProcessorKind("x86-64", ("-march=x86-64",), frozenset()),
    ),
    "aarch64": (
        ProcessorKind(
            "bf16", ("-march=armv8.2-a+dotprod+i8mm+bf16",), frozenset({"asimddp", "i8mm", "bf16"})
        ),  # Graviton 3, Neoverse V1 and N2
        ProcessorKind("i8mm", ("-march=armv8.2-a+dotprod+i8mm",), frozenset({"asimddp", "i8mm"})),
        ProcessorKind("dotprod", ("-march=armv8.2-a+dotprod",), frozenset({"asimddp"})),  # Graviton 2, Neoverse N1
        ProcessorKind("aarch64", ("-march=armv8-a",), frozenset()),
    ),
}
"""The kinds of each machine type, best first."""


def kinds_here() -> tuple[ProcessorKind, ...]:
    """Returns the kinds whose kernels this processor runs, best first."""
    here, vendor = features(), _of_first("vendor_id")
    return tuple(
        kind
        for kind in TARGETS.get(platform.machine(), ())
        if kind.features <= here and (not kind.vendors or kind.vendors & vendor)
    )


def kind_here() -> str:
    """Names the best kind, for people to read, and says so if the system refuses the processor's AMX tiles."""
    name = next((kind.name for kind in kinds_here()), platform.machine())
    has_unusable = not _TILES.isdisjoint(_of_first("flags")) and not may_use_tiles()
    return f"{name}; this system refuses AMX tiles" if has_unusable else name


def features() -> frozenset[str]:
    """Returns the features of the first processor, because Linux lists only those that all have. Tiles are left out
    where the process may not use them.
    """
    found = _of_first("flags", "Features")
    return found if found.isdisjoint(_TILES) or may_use_tiles() else found - _TILES


@functools.cache
def may_use_tiles() -> bool:
    """Asks Linux for this process's permission to use AMX tiles (its `Documentation/arch/x86/xstate.rst`).

    Sandboxes, containers with a strict seccomp profile and kernels before 5.16 refuse. A tile instruction would then
    end the process.
    """
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    arguments = map(ctypes.c_long, (arch_prctl, request_permission, tile_data))
    return platform.machine() == "x86_64" and ctypes.CDLL(None).syscall(*arguments) == 0


def _of_first(*fields: str) -> frozenset[str]:
    """Returns the words of the first processor's line that begins with one of `fields`."""
    return frozenset(next(iter(cpu_facts(*fields)), "").partition(":")[2].split())
