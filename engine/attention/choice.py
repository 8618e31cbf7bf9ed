"""Which attention implementation, and which page size, a platform gets: decided here and nowhere else."""

from __future__ import annotations

from engine.attention.contract import AttentionBackend
from engine.attention.ragged import RaggedKernelAttention
from engine.attention.xla import XlaAttention
from engine.errors import ConfigError
from engine.models import ModelConfig

ATTENTIONS = ("auto", "xla", "ragged")

SMEM_BYTES = 2**20  # scalar memory of a TPU core
SMEM_RESERVED_BYTES = 8 * 2**10  # the compiler's own

_CPU_PAGE_SIZE = 32
_TPU_PAGE_SIZE = 64
_TPU_MAX_PAGE_SIZE = 512


def backend_for(platform: str, model: ModelConfig, attention: str = "auto") -> AttentionBackend:
    """The implementation for `platform` (`cpu`, `gpu`, `tpu`), or the one that `attention` names.

    Raises:
        ConfigError: the one named does not run here, or not with this model.
    """
    if attention not in ATTENTIONS:
        raise ConfigError(f"attention {attention!r} is not one of {', '.join(ATTENTIONS)}")
    if attention == "auto":
        fits = platform == "tpu" and model.head_dim <= RaggedKernelAttention.max_head_dim
        return RaggedKernelAttention() if fits else XlaAttention()
    if attention == "xla":
        return XlaAttention()
    if platform != "tpu":
        raise ConfigError(f"attention {attention!r} runs on TPU only, and this is {platform}; set auto or xla")
    if model.head_dim > RaggedKernelAttention.max_head_dim:
        raise ConfigError(
            f"attention 'ragged' takes a head_dim of up to {RaggedKernelAttention.max_head_dim}, and the model's is "
            f"{model.head_dim}; set auto or xla"
        )
    return RaggedKernelAttention()


def page_size_for(platform: str, *, max_num_seqs: int, max_model_len: int) -> int:
    """Tokens per page where the setting leaves it open.

    On TPU pages are large, because each is one transfer from HBM; and they grow until the table of all sequences' pages
    fits into scalar memory.
    """
    if platform != "tpu":
        return _CPU_PAGE_SIZE
    page_size = _TPU_PAGE_SIZE
    while page_size < _TPU_MAX_PAGE_SIZE and not _fits(max_num_seqs, -(-max_model_len // page_size)):
        page_size *= 2
    return page_size


def check_page_table(*, max_num_seqs: int, max_model_len: int, page_size: int) -> None:
    """The rule of the TPU kernels, which hold the table of pages in scalar memory.

    Raises:
        ConfigError: the table does not fit.
    """
    pages_per_seq = -(-max_model_len // page_size)
    if _fits(max_num_seqs, pages_per_seq):
        return
    raise ConfigError(
        f"max_num_seqs {max_num_seqs} x {pages_per_seq} pages per sequence (max_model_len {max_model_len} / page_size "
        f"{page_size}) are {page_table_bytes(max_num_seqs, pages_per_seq)} bytes of page table, and the TPU's scalar "
        f"memory has room for {SMEM_BYTES - SMEM_RESERVED_BYTES}: raise page_size, or lower max_num_seqs or "
        "max_model_len"
    )


def page_table_bytes(max_num_seqs: int, pages_per_seq: int) -> int:
    """Pages and lengths of a step's sequences as they lie in scalar memory, in tiles of 8 x 128 words."""
    rows = _round_up(1 << (max_num_seqs - 1).bit_length(), 16)  # a step has a power of two of them
    return 4 * (rows * _round_up(pages_per_seq, 128) + 2 * rows)


def _fits(max_num_seqs: int, pages_per_seq: int) -> bool:
    return page_table_bytes(max_num_seqs, pages_per_seq) <= SMEM_BYTES - SMEM_RESERVED_BYTES


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
