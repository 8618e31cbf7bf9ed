"""llama.cpp, with batches of many sequences as in its server: decode rows first, then prompts.

Its sequences share no prefix cache.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import llama_cpp as llama  # type: ignore[import-not-found]
import numpy as np

from benchmarks.peers.protocol import (
    KV_CACHE_GIB,
    MAX_BATCH_TOKENS,
    MAX_NUM_SEQS,
    Clock,
    Got,
    Run,
    Setup,
    Wanted,
    serve,
)


@dataclass(slots=True)
class Slot:
    """A sequence of the cache, and the request in it."""

    wanted: Wanted
    got: Got
    num_computed: int = 0
    newest: list[int] = field(default_factory=list)  # the token to compute next, once the prompt is done

    def pending(self) -> list[int]:
        return self.newest or self.wanted.prompt[self.num_computed :]


@dataclass(slots=True)
class Server:
    context: Any
    vocab_size: int
    num_cells: int  # tokens that the cache can hold
    batch: Any = None
    slots: dict[int, Slot] = field(default_factory=dict)

    def has_room(self, wanted: Wanted) -> bool:
        taken = sum(len(slot.wanted.prompt) + slot.wanted.num_tokens for slot in self.slots.values())
        return len(self.slots) < MAX_NUM_SEQS and taken + len(wanted.prompt) + wanted.num_tokens <= self.num_cells

    def start(self, wanted: Wanted, got: Got) -> None:
        free = next(number for number in range(MAX_NUM_SEQS) if number not in self.slots)
        self.slots[free] = Slot(wanted, got)

    def step(self, clock: Clock) -> None:
        sampled = self._fill()
        if llama.llama_decode(self.context, self.batch) != 0:
            raise RuntimeError(f"llama_decode failed on a batch of {self.batch.n_tokens} tokens")
        tokens = {number: self._argmax(place) for number, place in sampled.items()}
        now_s = clock.now_s()
        for number, token in tokens.items():
            slot = self.slots[number]
            slot.got.add([token], now_s)
            slot.newest = [token]
            if len(slot.got.tokens) == slot.wanted.num_tokens:
                del self.slots[number]
                llama.llama_memory_seq_rm(llama.llama_get_memory(self.context), number, -1, -1)

    def _fill(self) -> dict[int, int]:
        """Puts the next tokens into the batch. Returns the rows that sample, by slot."""
        self.batch.n_tokens = 0
        sampled: dict[int, int] = {}
        for number, slot in sorted(self.slots.items(), key=lambda item: not item[1].newest):
            pending = slot.pending()
            tokens = pending[: MAX_BATCH_TOKENS - self.batch.n_tokens]
            for token in tokens:
                self._append(token, slot.num_computed, number)
                slot.num_computed += 1
            if tokens and len(tokens) == len(pending):
                sampled[number] = self.batch.n_tokens - 1
                self.batch.logits[self.batch.n_tokens - 1] = True
        return sampled

    def _append(self, token: int, position: int, number: int) -> None:
        place = self.batch.n_tokens
        self.batch.token[place], self.batch.pos[place], self.batch.logits[place] = token, position, False
        self.batch.n_seq_id[place], self.batch.seq_id[place][0] = 1, number
        self.batch.n_tokens += 1

    def _argmax(self, place: int) -> int:
        logits = np.ctypeslib.as_array(llama.llama_get_logits_ith(self.context, place), (self.vocab_size,))
        return int(np.argmax(logits))


def load(setup: Setup) -> Run:
    llama.llama_backend_init()
    model = llama.llama_model_load_from_file(setup.model.encode(), llama.llama_model_default_params())
    if not model:
        raise RuntimeError(f"llama.cpp did not load {setup.model}")
    server = Server(*context_of(model, setup))
    server.batch = llama.llama_batch_init(MAX_BATCH_TOKENS, 0, 1)
    run(server, [Wanted([5] * 20, 4, 0.0)])
    return lambda wanted: run(server, wanted)


def context_of(model: Any, setup: Setup) -> tuple[Any, int, int]:
    """Returns a context, the vocabulary size, and how many tokens the cache holds.

    Each sequence has its own cache if those fit, as attention then reads nothing of the others.
    """
    num_layers, num_heads = llama.llama_model_n_layer(model), llama.llama_model_n_head_kv(model)
    stated = meta(model, f"{meta(model, 'general.architecture')}.attention.key_length")
    head_dim = int(stated) if stated else llama.llama_model_n_embd(model) // llama.llama_model_n_head(model)
    params = llama.llama_context_default_params()
    params.type_k = params.type_v = llama.GGML_TYPE_F32 if setup.dtype == "float32" else llama.GGML_TYPE_F16
    token_bytes = 2 * num_layers * num_heads * head_dim * (4 if setup.dtype == "float32" else 2)
    num_cells = min(MAX_NUM_SEQS * setup.max_model_len, KV_CACHE_GIB * 2**30 // token_bytes)
    params.kv_unified = num_cells < MAX_NUM_SEQS * setup.max_model_len
    params.n_ctx, params.n_seq_max = num_cells, MAX_NUM_SEQS
    params.n_batch = params.n_ubatch = MAX_BATCH_TOKENS
    params.n_threads = params.n_threads_batch = len(os.sched_getaffinity(0))
    context = llama.llama_init_from_model(model, params)
    if not context:
        raise RuntimeError(f"llama.cpp made no context of {num_cells} tokens")
    return context, llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model)), num_cells


def meta(model: Any, key: str) -> str:
    """Returns a value of the file's metadata; empty if there is none."""
    buffer = bytes(256)
    length = llama.llama_model_meta_val_str(model, key.encode(), buffer, len(buffer))
    return buffer[: max(0, length)].decode()


def run(server: Server, wanted: list[Wanted]) -> list[Got]:
    got = [Got() for _ in wanted]
    clock, num_sent = Clock(), 0
    while num_sent < len(wanted) or server.slots:
        while num_sent < len(wanted) and wanted[num_sent].time_s <= clock.now_s() and server.has_room(wanted[num_sent]):
            server.start(wanted[num_sent], got[num_sent])
            num_sent += 1
        if not server.slots:
            clock.sleep_until(wanted[num_sent].time_s)
            continue
        server.step(clock)
    return got


if __name__ == "__main__":
    serve(llama.__version__, load)
