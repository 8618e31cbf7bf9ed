"""The settings of an engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from penstock.engine.errors import ConfigError
from penstock.engine.formats.packing import OWN_KINDS

DTYPE_SETTINGS = ("auto", "float32", "bfloat16", "float16")
ATTENTION_SETTINGS = ("auto", "native", "xla", "triton", "ragged", "fused")
MATMUL_SETTINGS = ("auto", "xla", "native")
WEIGHTS_SETTINGS = ("auto", *OWN_KINDS)
KV_CACHE_DTYPES = ("auto", "unquantized", "int8", "float8_e4m3fn")
ACTIVATIONS_SETTINGS = ("auto", "int8")
SPECULATION_SETTINGS = ("ngram", "off")
_SETTINGS = {
    "dtype": DTYPE_SETTINGS,
    "attention": ATTENTION_SETTINGS,
    "weights": WEIGHTS_SETTINGS,
    "activations": ACTIVATIONS_SETTINGS,
    "kv_cache_dtype": KV_CACHE_DTYPES,
    "speculation": SPECULATION_SETTINGS,
    "matmul": MATMUL_SETTINGS,
}

_INT32 = (1 << 31) - 1  # largest position, page or slot number on the device
_BOUNDS = {
    "max_num_seqs": (1, 1 << 16),
    "max_batch_tokens": (1, 1 << 20),
    "max_draft_tokens": (1, 1 << 10),
    "max_model_len": (1, _INT32),
    "page_size": (1, 1 << 16),
    "num_pages": (2, _INT32),
    "state_slots": (1, _INT32),
    "kv_cache_bytes": (1, (1 << 63) - 1),
    "tensor_parallel": (1, 1 << 16),
    "expert_parallel": (1, 1 << 16),
}
"""Values above the upper bound are typos on any machine."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes and limits of one engine. None means derived from the model and the device.

    Raises:
        ConfigError: a value contradicts another or is out of range; the message names it.
    """

    dtype: str = "auto"  # of weights and activations: auto (as on disk), float32, bfloat16, float16
    weights: str = "auto"  # how weights are held: auto (as stored), or quantized while they are loaded: int8, int4, fp8
    activations: str = "auto"  # multiplied with int8 weights: auto (as the checkpoint says), int8 by token
    max_model_len: int | None = None  # prompt and generated tokens of one sequence; None: the model's own limit
    max_num_seqs: int = 64  # sequences that run at once
    max_batch_tokens: int = 512  # most tokens that one step computes, a power of two
    page_size: int | None = None  # tokens per KV page; None: by platform
    num_pages: int | None = None  # of each kind, page 0 included; None: as many as `kv_cache_bytes` holds
    kv_cache_bytes: int | None = None  # None: a share of the device's free memory, 1 GiB where that is unknown
    state_slots: int | None = None  # recurrent states of sequences and prefixes; None: from pages and max_num_seqs
    kv_cache_dtype: str = "auto"  # auto (the checkpoint's, else unquantized), or a type
    prefix_caching: bool = True
    speculation: str = "ngram"  # the drafter, used where it pays: ngram or off; output is the same
    max_draft_tokens: int = 15  # per sequence and step
    decode_steps: int | None = None  # in one dispatch; None: 1 on TPU, else the fastest that warm-up measures
    prefill_share: float = 0.4  # share of the longest step that prompts may add to a decoding step
    tensor_parallel: int = 1  # devices that the model, or each expert group, is split over
    expert_parallel: int = 1  # groups of `tensor_parallel` devices that experts are divided over
    attention: str = "auto"  # auto, xla, native (C++, for CPU), triton (for GPU), ragged or fused (for TPU)
    matmul: str = "auto"  # auto, xla or native (C++ built on this machine, with packed weights, for CPU)
    chat_format: str = "auto"  # how chat replies are parsed: auto (by the chat template), none, or a format's name
    compile_cache_dir: Path | None = None  # persistent compilation cache; None keeps none

    def __post_init__(self) -> None:
        self._check_amounts()
        for name, accepted in _SETTINGS.items():
            _require_one_of(name, getattr(self, name), accepted)
        if self.max_batch_tokens < 16 or self.max_batch_tokens & (self.max_batch_tokens - 1):
            message = f"max_batch_tokens must be a power of two from 16, not {self.max_batch_tokens}"
            _refuse(message, "max_batch_tokens")
        if self.decode_steps is not None and not 1 <= self.decode_steps <= 64:
            _refuse(f"decode_steps must be 1 to 64, not {self.decode_steps}", "decode_steps")
        if not 0 <= self.prefill_share <= 1:
            _refuse(f"prefill_share must be 0 to 1, not {self.prefill_share}", "prefill_share")
        if self.max_num_seqs > self.max_batch_tokens:
            message = (
                f"max_num_seqs {self.max_num_seqs} is above max_batch_tokens {self.max_batch_tokens}: "
                "a step could not give every running sequence its token"
            )
            _refuse(message, "max_num_seqs", "max_batch_tokens")

    def _check_amounts(self) -> None:
        for name, (least, most) in _BOUNDS.items():
            value = getattr(self, name)
            if value is not None and value < least:
                why = " (page 0 only takes padding)" if name == "num_pages" else ""
                _refuse(f"{name} must be {least} or more{why}, not {value}", name)
            if value is not None and value > most:
                _refuse(f"{name} must be at most {most}, not {value}", name)
        if self.num_pages is not None and self.kv_cache_bytes is not None:
            both = "num_pages and kv_cache_bytes both say how large the KV cache is: give one"
            _refuse(both, "num_pages", "kv_cache_bytes")

    @property
    def num_devices(self) -> int:
        """Number of devices that one copy of the model uses."""
        return self.tensor_parallel * self.expert_parallel

    @property
    def parallelism(self) -> str:
        """The parallelism settings, for messages."""
        tensor = f"tensor_parallel = {self.tensor_parallel}"
        return tensor if self.expert_parallel == 1 else f"{tensor} times expert_parallel = {self.expert_parallel}"


def _require_one_of(name: str, value: str, accepted: tuple[str, ...]) -> None:
    if value not in accepted:
        _refuse(f"{name} must be one of {', '.join(accepted)}, not {value!r}", name)


def _refuse(message: str, *names: str) -> NoReturn:
    raise ConfigError(message, *names)
