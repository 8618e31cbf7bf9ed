"""The settings of an engine, declared once: `worker.settings` and `local.engine_options` follow."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NoReturn

from penstock.engine.errors import ConfigError
from penstock.engine.formats.packing import ONLINE_KINDS
from penstock.engine.setting import Setting, faults

ATTENTION_SETTINGS = ("auto", "native", "xla", "triton", "ragged", "fused")
RAW_LOGPROBS = "raw_logprobs"
_INT32 = (1 << 31) - 1  # largest position, page or slot number on the device


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes and limits of one engine. None means derived from the model and the device.

    Raises:
        ConfigError: a value contradicts another or is out of range; the message names it.
    """

    dtype: Annotated[
        str,
        Setting(
            "Type of weights and activations: auto (as on disk), float32, bfloat16 or float16.",
            one_of=("auto", "float32", "bfloat16", "float16"),
        ),
    ] = "auto"
    weights: Annotated[
        str,
        Setting(
            "How weights are held in memory: auto (as stored), or an unquantized checkpoint quantized at "
            "loading to int8, int4 or fp8.",
            one_of=("auto", *ONLINE_KINDS),
        ),
    ] = "auto"
    activations: Annotated[
        str,
        Setting(
            "Type of the activations that int8 and int4 weights are multiplied by: auto (as the checkpoint says), or "
            "int8, which quantizes them token by token.",
            one_of=("auto", "int8"),
        ),
    ] = "auto"
    max_model_len: Annotated[
        int | None,
        Setting("Tokens of one sequence, prompt and reply together; none: the model's own limit.", 1, sane=_INT32),
    ] = None
    max_num_seqs: Annotated[int, Setting("Sequences that run at once.", 1, sane=1 << 16)] = 64
    max_batch_tokens: Annotated[
        int, Setting("Most tokens that one step computes, a power of two from 16.", 1, sane=1 << 20)
    ] = 512
    page_size: Annotated[
        int | None, Setting("Tokens per page of the KV cache; none: what suits the device.", 1, sane=1 << 16)
    ] = None
    num_pages: Annotated[
        int | None,
        Setting(
            "Pages of each kind in the KV cache; none: as many as kv_cache_bytes holds.",
            2,
            sane=_INT32,
            why="page 0 only takes padding",
        ),
    ] = None
    kv_cache_bytes: Annotated[
        int | None,
        Setting(
            "Size of the KV cache, such as 512MiB; none: a share of the device's free memory, or 1 GiB where "
            "that is unknown.",
            1,
            sane=(1 << 63) - 1,
        ),
    ] = None
    state_slots: Annotated[
        int | None,
        Setting(
            "Slots for the states of running sequences and prefixes, in models that have such layers; none: "
            "one for each of max_num_seqs, and as many for prefixes as suit the pages.",
            1,
            sane=_INT32,
        ),
    ] = None
    kv_cache_dtype: Annotated[
        str,
        Setting(
            "Type of keys and values in the KV cache: auto (what the checkpoint says, if the attention has "
            "it, else unquantized), unquantized, int8 (native, fused or xla) or float8_e4m3fn (fused or xla).",
            one_of=("auto", "unquantized", "int8", "float8_e4m3fn"),
        ),
    ] = "auto"
    decode_steps: Annotated[
        int | None,
        Setting(
            "Decode steps in one dispatch while nobody waits; none: 1, or 1 or 8, as warm-up measures, where that "
            "changes no bit (`batch_invariant`).",
            1,
            64,
        ),
    ] = None
    same_tokens: Annotated[
        bool,
        Setting(
            "Never choose by timings at the start what may change tokens, so that equal workers have one arithmetic. "
            "Off, times choose decode steps, and on a CPU matmuls (C++ or XLA) if these are auto. Each choice is an "
            "arithmetic of its own."
        ),
    ] = True
    logprobs_mode: Annotated[
        str,
        Setting(
            "Distribution of log-probabilities: adjusted (after bias, penalties and masks, before temperature and "
            "filters), or raw_logprobs (the model's own, vLLM's default).",
            one_of=("adjusted", RAW_LOGPROBS),
        ),
    ] = "adjusted"
    speculation: Annotated[
        str,
        Setting(
            "How tokens are guessed, to verify several at once: ngram (what followed the last tokens earlier in "
            "prompt or reply) or off. Replies are the same.",
            one_of=("ngram", "off"),
        ),
    ] = "ngram"
    max_draft_tokens: Annotated[
        int, Setting("Most guessed tokens of one sequence that a step verifies.", 1, sane=1 << 10)
    ] = 15
    prefix_caching: Annotated[bool, Setting("Keep the pages of finished prompts for prompts with the same prefix.")] = (
        True
    )
    prefill_share: Annotated[
        float,
        Setting(
            "How much prompts may add to a step in which sequences decode, as a share of the longest step. "
            "Less makes streams even, more makes first tokens early.",
            0,
            1,
        ),
    ] = 0.4
    tensor_parallel: Annotated[
        int,
        Setting(
            "Devices that share one copy of the model; with expert_parallel, one group of them.",
            1,
            sane=1 << 16,
        ),
    ] = 1
    expert_parallel: Annotated[
        int,
        Setting(
            "Groups of tensor_parallel devices that divide the experts; the rest is split over all devices.",
            1,
            sane=1 << 16,
        ),
    ] = 1
    attention: Annotated[
        str,
        Setting(
            "How attention is computed: auto, xla, native (C++ built on this machine, for CPU), triton (for GPU), "
            "fused or ragged (for TPU).",
            one_of=ATTENTION_SETTINGS,
        ),
    ] = "auto"
    matmul: Annotated[
        str,
        Setting(
            "How matmuls are computed: auto, xla, native (C++ built on this machine, for CPU).",
            one_of=("auto", "xla", "native"),
        ),
    ] = "auto"
    chat_format: Annotated[
        str,
        Setting(
            "How answers in chats are read, for reasoning and tool calls: auto (by the chat template), none, or a "
            "format of docs/chat.md."
        ),
    ] = "auto"
    split_special_tokens: Annotated[
        bool,
        Setting(
            "Treat special tokens spelled in a chat's messages as text, except in the assistant's. Those of the "
            "chat template stay special.",
        ),
    ] = False
    compile_cache_dir: Annotated[
        Path | None, Setting("Where compiled programs are kept, so that the next start is quick; none: nowhere.")
    ] = None

    def __post_init__(self) -> None:
        for name, fault in faults(self):
            _refuse(f"{name} {fault}", name)
        if self.num_pages is not None and self.kv_cache_bytes is not None:
            both = "num_pages and kv_cache_bytes both say how large the KV cache is: give one"
            _refuse(both, "num_pages", "kv_cache_bytes")
        if self.max_batch_tokens < 16 or self.max_batch_tokens & (self.max_batch_tokens - 1):
            message = f"max_batch_tokens must be a power of two from 16, not {self.max_batch_tokens}"
            _refuse(message, "max_batch_tokens")
        if self.max_num_seqs > self.max_batch_tokens:
            message = (
                f"max_num_seqs {self.max_num_seqs} is above max_batch_tokens {self.max_batch_tokens}: "
                "a step could not give every running sequence its token"
            )
            _refuse(message, "max_num_seqs", "max_batch_tokens")

    @property
    def num_devices(self) -> int:
        """Number of devices that one copy of the model uses."""
        return self.tensor_parallel * self.expert_parallel

    @property
    def parallelism(self) -> str:
        """The parallelism settings, for messages."""
        tensor = f"tensor_parallel = {self.tensor_parallel}"
        return tensor if self.expert_parallel == 1 else f"{tensor} times expert_parallel = {self.expert_parallel}"


def _refuse(message: str, *names: str) -> NoReturn:
    raise ConfigError(message, *names)
