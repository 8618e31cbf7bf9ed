"""What an operator decides about an engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from penstock.engine.errors import ConfigError
from penstock.engine.formats.packing import OWN_KINDS

MATMUL_SETTINGS = ("auto", "xla", "native")
WEIGHTS_SETTINGS = ("auto", *OWN_KINDS)
KV_CACHE_DTYPES = ("auto", "unquantized", "int8", "float8_e4m3fn")
ACTIVATIONS_SETTINGS = ("auto", "int8")
SPECULATION_SETTINGS = ("ngram", "off")
_SETTINGS = {
    "weights": WEIGHTS_SETTINGS,
    "activations": ACTIVATIONS_SETTINGS,
    "kv_cache_dtype": KV_CACHE_DTYPES,
    "speculation": SPECULATION_SETTINGS,
    "matmul": MATMUL_SETTINGS,
}


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes and limits of one engine. Values left at None are derived from the model and the device.

    Raises:
        ConfigError: a value that contradicts another, or is out of range; the message names it.
    """

    dtype: str = "auto"  # of weights and activations: auto (as on disk), float32, bfloat16, float16
    weights: str = "auto"  # how weights are held: auto (as stored), or quantized while they are loaded: int8, int4, fp8
    activations: str = "auto"  # that weights in int8 are multiplied with: auto (as the checkpoint says), int8 by token
    max_model_len: int | None = None  # prompt and generated tokens of one sequence; None: the model's own limit
    max_num_seqs: int = 64  # sequences that run at once
    max_batch_tokens: int = 512  # tokens that one step computes at most, a power of two
    page_size: int | None = None  # tokens per KV page; None: what suits the platform
    num_pages: int | None = None  # of each kind, page 0 included; None: as many as `kv_cache_bytes` holds
    kv_cache_bytes: int | None = None  # None: a share of the device's free memory, 1 GiB where that is unknown
    state_slots: int | None = None  # recurrent states, of sequences and of prefixes; None: by pages and max_num_seqs
    kv_cache_dtype: str = "auto"  # of keys and values: auto (the checkpoint's, else unquantized), or as named
    prefix_caching: bool = True
    speculation: str = "ngram"  # who drafts tokens, where that pays: ngram, or off; tokens are the same
    max_draft_tokens: int = 15  # of one sequence in a step
    decode_steps: int | None = None  # in one dispatch; None: 1 on TPU, else what warm-up measures to be quicker
    prefill_share: float = 0.4  # of the longest step, which prompts may add to one in which sequences decode
    tensor_parallel: int = 1  # devices that the model is split over, or each group of them
    expert_parallel: int = 1  # groups of `tensor_parallel` devices that experts are divided over
    attention: str = "auto"  # auto, xla, native (C++, for CPU), triton (for GPU), ragged or fused (for TPU)
    matmul: str = "auto"  # auto, xla or native (C++ built on this machine, with packed weights, for CPU)
    chat_format: str = "auto"  # how answers in chats are read: auto (by the chat template), none, or a format's name
    compile_cache_dir: Path | None = None  # persistent compilation cache; None keeps none

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_batch_tokens", "max_draft_tokens", "tensor_parallel", "expert_parallel"):
            _require_positive(name, getattr(self, name))
        for name in ("max_model_len", "kv_cache_bytes", "page_size", "state_slots"):
            if getattr(self, name) is not None:
                _require_positive(name, getattr(self, name))
        if self.num_pages is not None and self.num_pages < 2:
            raise ConfigError(f"num_pages must be 2 or more (page 0 only takes padding), not {self.num_pages}")
        if self.num_pages is not None and self.kv_cache_bytes is not None:
            raise ConfigError("num_pages and kv_cache_bytes both say how large the KV cache is: give one")
        for name, accepted in _SETTINGS.items():
            _require_one_of(name, getattr(self, name), accepted)
        if self.max_batch_tokens < 16 or self.max_batch_tokens & (self.max_batch_tokens - 1):
            raise ConfigError(f"max_batch_tokens must be a power of two from 16, not {self.max_batch_tokens}")
        if self.decode_steps is not None and not 1 <= self.decode_steps <= 64:
            raise ConfigError(f"decode_steps must be 1 to 64, not {self.decode_steps}")
        if not 0 <= self.prefill_share <= 1:
            raise ConfigError(f"prefill_share must be 0 to 1, not {self.prefill_share}")
        if self.max_num_seqs > self.max_batch_tokens:
            raise ConfigError(
                f"max_num_seqs {self.max_num_seqs} is above max_batch_tokens {self.max_batch_tokens}: "
                "a step could not give every running sequence its token"
            )

    @property
    def num_devices(self) -> int:
        """Of one copy of the model."""
        return self.tensor_parallel * self.expert_parallel

    @property
    def parallelism(self) -> str:
        """As messages name it."""
        tensor = f"tensor_parallel = {self.tensor_parallel}"
        return tensor if self.expert_parallel == 1 else f"{tensor} times expert_parallel = {self.expert_parallel}"


def _require_one_of(name: str, value: str, accepted: tuple[str, ...]) -> None:
    if value not in accepted:
        raise ConfigError(f"{name} must be one of {', '.join(accepted)}, not {value!r}")


def _require_positive(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{name} must be 1 or more, not {value}")
