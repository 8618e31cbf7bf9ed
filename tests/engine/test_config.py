"""Engine settings that contradict one another or are out of range."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

import pytest

from penstock.engine import ConfigError, EngineConfig
from penstock.engine.setting import Setting, declared


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({"max_batch_tokens": 100}, "max_batch_tokens must be a power of two from 16, not 100"),
        ({"max_num_seqs": 64, "max_batch_tokens": 32}, "max_num_seqs 64 is above max_batch_tokens 32"),
        ({"num_pages": 1}, "num_pages must be 2 or more"),
        ({"page_size": 0}, "page_size must be 1 or more, not 0"),
        ({"num_pages": 8, "kv_cache_bytes": 8}, "give one"),
        ({"max_num_seqs": 0}, "max_num_seqs must be 1 or more, not 0"),
        ({"tensor_parallel": -1}, "tensor_parallel must be 1 or more, not -1"),
        ({"max_batch_tokens": 8, "max_num_seqs": 1}, "max_batch_tokens must be a power of two from 16, not 8"),
        ({"decode_steps": 65}, "decode_steps must be 1 to 64, not 65"),
        (
            {"kv_cache_dtype": "int4"},
            "must be one of auto, unquantized, int8, float8_e4m3fn, not 'int4'",
        ),
        ({"weights": "int3"}, "weights must be one of auto, int8, int4, fp8, not 'int3'"),
        ({"activations": "int4"}, "activations must be one of auto, int8, not 'int4'"),
        ({"matmul": "onednn"}, "matmul must be one of auto, xla, native, not 'onednn'"),
    ],
)
def test_contradictory_settings_are_refused(config: dict[str, Any], names: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(names)):
        EngineConfig(**config)


@pytest.mark.parametrize("value", [1.5, float("nan"), -1])
def test_a_share_that_is_none_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match=f"prefill_share must be 0 to 1, not {value}"):
        EngineConfig(prefill_share=value)


def test_every_field_declares_what_it_means() -> None:
    assert list(declared(EngineConfig)) == [field.name for field in fields(EngineConfig)]
    assert [name for name, field in declared(EngineConfig).items() if not field.setting.text.endswith(".")] == []


@pytest.mark.parametrize(("name", "setting"), [(name, field.setting) for name, field in declared(EngineConfig).items()])
def test_a_setting_is_refused_by_name_outside_its_declared_range(name: str, setting: Setting) -> None:
    wrong: list[Any] = []
    if setting.least is not None:
        wrong.append(setting.least - 1)
    wrong += [most + 1 for most in (setting.most, setting.sane) if most is not None]
    wrong += ["x", ""] if setting.one_of else []
    for value in wrong:
        with pytest.raises(ConfigError, match=rf"^{name} must be .*, not {value!r}$") as caught:
            EngineConfig(**{name: value})
        assert caught.value.settings == (name,)
    for value in setting.one_of:
        config: dict[str, Any] = {name: value}
        assert getattr(EngineConfig(**config), name) == value


def test_the_defaults_are_consistent_and_the_smallest_step_is_allowed() -> None:
    assert EngineConfig().max_num_seqs <= EngineConfig().max_batch_tokens
    assert EngineConfig(max_num_seqs=16, max_batch_tokens=16, num_pages=2, page_size=1).max_batch_tokens == 16
