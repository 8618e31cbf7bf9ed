"""Plans know the kernels that a compiled program calls: their geometry, their form, and what they take."""

from __future__ import annotations

import jax
import pytest

from benchmarks.parts.tpu_kernels import KERNELS, Geometry, compile_kernel, held_shapes
from penstock.engine.formats.packing import Packing
from penstock.engine.kernels.tpu import KernelForm
from penstock.tools.plan.device.chips import CHIPS
from penstock.tools.plan.device.forms import FORMS, form_of
from penstock.tools.plan.device.hlo import HloModule, Traffic
from penstock.tools.plan.device.kernel_calls import KernelCall
from penstock.tools.plan.device.kernel_work import Basis, Load, kernels_of
from penstock.tools.plan.schedules import table
from penstock.tools.plan.schedules.table import Row
from tests.support.needs import needs_libtpu

TYPES = {"int8": "s8", "uint8": "u8", "int16": "s16", "bfloat16": "bf16", "float32": "f32"}
KINDS_OF_DEVICES = ("TPU v5 lite", "TPU v6 lite", "TPU7x")
LOAD = Load(3, 3, is_drawn=True)
READ: dict[str, tuple[Geometry, int | str]] = {
    "quantized matmul": ({"form": "fp8 of rows", "out": 256, "in": 1024}, 16),
    "experts": ({"form": "mxfp4", "out": 256, "in": 512}, 16),
    "draw": ({"rows": 8, "vocab": 4096}, "filtered"),
    "adjust": ({"rows": 8, "vocab": 8192}, "anything"),
    "delta rule": ({"key_heads": 2, "value_heads": 4, "head_dim": 128}, 64),
}


def given(packing: Packing, num_out: int, num_in: int, device_kind: str) -> str | None:
    """Returns the form that is read from what a kernel is given of such a weight."""
    form = KernelForm.of_chip(packing, device_kind)
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    held = held_shapes(form, num_out, num_in, (), place)
    arrays = [held[name] for name in form.names]
    codes = arrays[0].shape[0] * form.num_planes
    return form_of([(TYPES[str(each.dtype)], (each.shape[0], each.shape[1])) for each in arrays], codes)


@pytest.mark.parametrize(("num_out", "num_in"), [(4096, 4096), (5760, 2880), (256, 1024), (2048, 14336)])
@pytest.mark.parametrize("name", FORMS)
def test_the_form_of_a_weight_is_read_from_its_arrays(name: str, num_out: int, num_in: int) -> None:
    if num_in % 128 and FORMS[name].group == 128:
        num_in = 2816
    assert [given(FORMS[name], num_out, num_in, kind) for kind in KINDS_OF_DEVICES] == [name] * 3


def test_a_form_that_the_table_lacks_has_no_name() -> None:
    for packing in (Packing("int4", 64, scale="float16"), Packing("int8", 32), Packing("fp8", 128, rows=1)):
        assert [given(packing, 4096, 4096, kind) for kind in KINDS_OF_DEVICES] == [None] * 3


@pytest.mark.versions
@needs_libtpu
@pytest.mark.usefixtures("as_shipped_elsewhere")
@pytest.mark.parametrize("kind", [kind for kind in KERNELS if "attention" not in kind])
def test_a_call_has_the_geometry_that_it_was_compiled_for(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan takes its schedule's time, and says that it knows none for another chip."""
    geometry, point = READ[kind]
    (compiled,) = compile_kernel(kind, "v6e:2x2", geometry, [point])
    traffic = HloModule(compiled.as_text() or "").traffic(10**12, dearest=True)
    ((key, (times, *_)),) = [found for found in traffic.calls.items() if KERNELS[kind].name in found[0]]
    call = KernelCall.of_key(key)
    assert (call.name, call.kind, dict(call.geometry)) == (KERNELS[kind].name, kind, geometry)
    assert kind == "draw" or call.point == point
    assert times == (2 if kind == "delta rule" else 1)  # in a loop of two layers

    monkeypatch.setattr("penstock.tools.plan.schedules.scaling.version", lambda _: "9")
    monkeypatch.setattr(
        table,
        "shipped",
        lambda: (
            Row(
                "9",
                "v6e",
                kind,
                geometry,
                1,
                0,
                0,
                0,
                0,
                {str(point): 10**9} | ({"greedy": 10} if kind == "draw" else {}),
            ),
        ),
    )
    if kind == "experts":  # how many tiles have rows is the plan's to know
        return
    own, *others = kernels_of(Traffic(calls={key: [times, 8, 16]}, kernel_bytes=8, kernel_flops=16), CHIPS["v6e"], LOAD)
    assert (own.basis, own.num_bytes, own.cycles) == (Basis.SCHEDULE, 8, 10**9 * (6 if kind == "delta rule" else 1))
    assert [(other.num_bytes, other.flops) for other in others] == [(0, 0)]
    own, *_ = kernels_of(traffic, CHIPS["v5e"], LOAD)
    assert (own.basis, own.cycles) == (Basis.NONE, 0)
