"""The choice of attention implementation and page size for a platform: made here and nowhere else."""

from __future__ import annotations

from penstock.engine.attention.contract import AttentionBackend
from penstock.engine.attention.fused import FusedAttention
from penstock.engine.attention.native import NativeAttention
from penstock.engine.attention.quantization import is_quantized
from penstock.engine.attention.ragged import NO_SHARING, NO_SINKS, RaggedKernelAttention
from penstock.engine.attention.xla import XlaAttention
from penstock.engine.config import ATTENTION_SETTINGS
from penstock.engine.errors import ConfigError
from penstock.engine.kernels.cpu import NativeLibrary

_NATIVE_DTYPES = ("float32", "bfloat16", "float16")
_TPU_DTYPES = ("bfloat16", "float32")

SMEM_BYTES = 2**20  # scalar memory of a TPU core
SMEM_RESERVED_BYTES = 8 * 2**10  # for the compiler

_CPU_PAGE_SIZE = 32
_GPU_PAGE_SIZE = 64  # the size of a block of keys, in half precision with a head_dim of up to 128
_TPU_PAGE_SIZE = 64
_TPU_SCALED_PAGE_SIZE = 128  # lanes of a tile, on which a page's scales lie
_TPU_MAX_PAGE_SIZE = 512


def attention_for(
    setting: str,
    platform: str,
    dtype: str,
    library: NativeLibrary,
    *,
    head_dim: int = 128,
    has_sinks: bool = False,
    shares_kv: bool = False,
    kv_dtype: str | None = None,  # of the pages; None: the implementation's choice for the model's type
    device_kind: str | None = None,  # as JAX names it; TPU7x converts another fp8 than the TPUs before it
) -> AttentionBackend:
    """Returns the implementation for a device platform (`cpu`, `gpu`, `tpu`) and a model.

    What matters of the model is its type, its head size, and whether it has attention sinks, or layers that read the
    keys and values of others.

    `auto` takes our kernel on TPU, which moves fewer bytes than the one that ships with JAX (docs/tpu-kernels.md); our
    kernels on GPU (docs/gpu.md); on CPU the native form if there is a C++ compiler; and otherwise the XLA form.

    Raises:
        ConfigError: `setting` cannot be had here; the message says why.
    """
    if setting not in ATTENTION_SETTINGS:
        raise ConfigError(f"attention must be one of {', '.join(ATTENTION_SETTINGS)}, not {setting!r}")
    if setting == "xla":
        return XlaAttention(platform, kv_dtype=kv_dtype)
    if setting in ("ragged", "fused") or (setting == "auto" and platform == "tpu"):
        _check_tpu(setting, platform, dtype)
        if setting != "ragged":
            return FusedAttention(kv_dtype=kv_dtype, device_kind=device_kind)
        return _ragged(head_dim, has_sinks=has_sinks, shares_kv=shares_kv, kv_dtype=kv_dtype)
    if setting == "triton" or (setting == "auto" and platform == "gpu"):
        return _choose_for_gpu(setting, platform, kv_dtype)
    return _native(setting, platform, dtype, library, kv_dtype)


def _check_tpu(setting: str, platform: str, dtype: str) -> None:
    if platform != "tpu":
        raise ConfigError(f"attention {setting!r} is for TPU, not {platform}; set auto or xla")
    if dtype not in _TPU_DTYPES:
        raise ConfigError(
            f"the TPU kernels take a dtype of {' or '.join(_TPU_DTYPES)}, not {dtype}; set dtype, or attention xla"
        )


def _ragged(head_dim: int, *, has_sinks: bool, shares_kv: bool, kv_dtype: str | None) -> AttentionBackend:
    if kv_dtype is not None:
        raise ConfigError(
            f"attention 'ragged' has no kv_cache_dtype {kv_dtype}, as it reads no scales of tokens; set attention fused"
        )
    if head_dim > RaggedKernelAttention.max_head_dim:
        limit = f"takes a head_dim of up to {RaggedKernelAttention.max_head_dim}, not {head_dim}"
        raise ConfigError(f"attention 'ragged' {limit}; set auto, fused or xla")
    if has_sinks:
        raise ConfigError(NO_SINKS)
    if shares_kv:
        raise ConfigError(NO_SHARING)
    return RaggedKernelAttention()


def _choose_for_gpu(setting: str, platform: str, kv_dtype: str | None) -> AttentionBackend:
    if platform != "gpu":
        raise ConfigError(f"attention 'triton' is for GPU, not {platform}; set auto or xla")
    if kv_dtype is None:
        from penstock.engine.attention.triton import TritonAttention  # loads Triton's dialect, which only GPUs need

        return TritonAttention()
    if setting == "auto":
        return XlaAttention(platform, kv_dtype=kv_dtype)
    raise ConfigError(f"attention 'triton' has no kv_cache_dtype {kv_dtype}; set attention xla, or auto for both")


def _native(setting: str, platform: str, dtype: str, library: NativeLibrary, kv_dtype: str | None) -> AttentionBackend:
    fits = platform == "cpu" and dtype in _NATIVE_DTYPES
    has_kv_dtype = kv_dtype is None or kv_dtype in NativeAttention.quantized_dtypes
    if setting == "auto" and not (has_kv_dtype and fits):
        return XlaAttention(platform, kv_dtype=kv_dtype)
    if not has_kv_dtype:
        raise ConfigError(f"attention 'native' has no kv_cache_dtype {kv_dtype}; set attention xla, or auto for both")
    if not fits:
        limit = f"for {' and '.join(_NATIVE_DTYPES)} on CPU"
        raise ConfigError(f"attention 'native' is {limit}, not {dtype} on {platform}")
    if library.load_for("attention", setting) is None:
        return XlaAttention(platform, kv_dtype=kv_dtype)
    return NativeAttention(kv_dtype=kv_dtype)


def page_size_for(platform: str, *, max_num_seqs: int, max_model_len: int, kv_dtype: str = "bfloat16") -> int:
    """Returns the number of tokens per page if the setting leaves it open.

    On TPU pages are large, because each is one transfer from HBM. They grow until the page table of all sequences fits
    into scalar memory.
    """
    if platform != "tpu":
        return _GPU_PAGE_SIZE if platform == "gpu" else _CPU_PAGE_SIZE
    page_size = _TPU_SCALED_PAGE_SIZE if is_quantized(kv_dtype) else _TPU_PAGE_SIZE
    while page_size < _TPU_MAX_PAGE_SIZE and not _fits(max_num_seqs, -(-max_model_len // page_size)):
        page_size *= 2
    return page_size


def check_page_table(*, max_num_seqs: int, max_model_len: int, page_size: int) -> None:
    """Checks that the page table fits into scalar memory, where the TPU kernels hold it.

    Raises:
        ConfigError: the table does not fit.
    """
    pages_per_seq = -(-max_model_len // page_size)
    if _fits(max_num_seqs, pages_per_seq):
        return
    raise ConfigError(
        f"max_num_seqs {max_num_seqs} x {pages_per_seq} pages per sequence (max_model_len {max_model_len} / page_size "
        f"{page_size}) are {page_table_bytes(max_num_seqs, pages_per_seq)} bytes of page table, and the TPU's scalar "
        f"memory holds {SMEM_BYTES - SMEM_RESERVED_BYTES}: raise page_size, or lower max_num_seqs or "
        "max_model_len"
    )


def page_table_bytes(max_num_seqs: int, pages_per_seq: int) -> int:
    """Returns the bytes of a step's page numbers and lengths in scalar memory, in tiles of 8 x 128 words."""
    rows = _round_up(1 << (max_num_seqs - 1).bit_length(), 16)  # a step has a power of two of sequences
    return 4 * (rows * _round_up(pages_per_seq, 128) + 2 * rows)


def _fits(max_num_seqs: int, pages_per_seq: int) -> bool:
    return page_table_bytes(max_num_seqs, pages_per_seq) <= SMEM_BYTES - SMEM_RESERVED_BYTES


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
