"""Runs transformers' plain `generate`, one request at a time: all other tokens are compared with its."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from benchmarks.peers.protocol import Clock, Got, Run, Setup, Wanted, serve


def load(setup: Setup) -> Run:
    torch.set_grad_enabled(False)
    loaded = AutoModelForCausalLM.from_pretrained(setup.model, dtype=getattr(torch, setup.dtype))
    loaded.eval()
    return lambda wanted: [answer(loaded, each) for each in wanted]


def answer(model: Any, wanted: Wanted) -> Got:
    clock, got = Clock(), Got()
    ids = torch.tensor([wanted.prompt])
    length = wanted.num_tokens
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=length, min_new_tokens=length,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    got.add(out[0, len(wanted.prompt) :].tolist(), clock.now_s())
    return got


if __name__ == "__main__":
    serve(transformers.__version__, load)
