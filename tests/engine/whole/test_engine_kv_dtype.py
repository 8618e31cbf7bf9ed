"""An 8-bit KV cache takes half the bytes or less, and its answers stay close to those of full precision."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from examples.demo_model.data import TASKS, Example, held_out_problems
from examples.demo_model.packing import Encoded, encode
from penstock.engine import ConfigError, Engine, EngineConfig, Request, SamplingParams
from penstock.engine.demo import MODEL_DIR
from penstock.engine.deployment.cache_sizes import with_pages
from penstock.engine.deployment.deployment import deploy
from penstock.engine.loading.checkpoint import read_model_config
from tests.engine.engines import SMALL, Result, drive, forget_prefixes, preempting
from tests.support.patience import slow

FP8, INT8 = "float8_e4m3fn", "int8"


@pytest.mark.parametrize(
    ("attention", "dtype", "bound"), [("xla", FP8, 0.15), ("xla", INT8, 0.05), ("auto", INT8, 0.05)]
)
def test_log_probabilities_stay_close_to_those_of_full_precision(
    tiny_model: Path, attention: str, dtype: str, bound: float
) -> None:
    """Prompts have several chunks, so that keys and values of all ages are read back."""
    request = Request("r", tuple(range(7, 47)), SamplingParams(max_tokens=1, temperature=0.0, logprobs=20))
    found = []
    for kept in ("auto", dtype):
        engine = Engine.from_checkpoint(tiny_model, replace(SMALL, attention=attention, kv_cache_dtype=kept))
        found.append({top.token_id: top.logprob for top in drive(engine, [request])["r", 0].logprobs[0].top})
    exact, narrow = found
    shared = exact.keys() & narrow.keys()
    assert len(shared) >= 10
    assert max(abs(exact[token] - narrow[token]) for token in shared) < bound
    assert exact != narrow


@pytest.mark.parametrize("attention", ["xla", "auto"])
def test_pages_are_counted_as_they_are_kept_with_their_scales(tiny_model: Path, attention: str) -> None:
    model = read_model_config(tiny_model)
    config = replace(SMALL, attention=attention, num_pages=None, kv_cache_bytes=2**16, max_num_seqs=16)
    wide, floats, codes = (deploy(replace(config, kv_cache_dtype=dtype), model) for dtype in ("auto", FP8, INT8))
    assert floats.page_bytes == codes.page_bytes
    assert codes.page_bytes * 4 * 16 == wide.page_bytes * (16 + 4)  # head_dim is 16, and a scale has 4 bytes
    for deployment in (wide, floats, codes):
        assert with_pages(deployment, 0).num_pages == 2**16 // deployment.page_bytes
    assert codes.describe(with_pages(codes, 0)).kv_dtype == INT8


def test_other_types_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="auto, unquantized, int8, float8_e4m3fn, not 'fp8'"):
        EngineConfig(kv_cache_dtype="fp8")


@pytest.mark.parametrize("dtype", [INT8, FP8])
def test_tokens_do_not_depend_on_company_preemption_resumption_or_the_prefix_cache(
    dtype: str, tiny_model: Path
) -> None:
    """The content of a page follows from its tokens alone."""
    engine = Engine.from_checkpoint(tiny_model, replace(SMALL, kv_cache_dtype=dtype))
    prompt = tuple(range(40, 60))
    params = SamplingParams(temperature=1.1, seed=7, max_tokens=14, ignore_eos=True, logprobs=1)
    request = Request("r", prompt, params)
    expected = drive(engine, [request])["r", 0]
    again = drive(engine, [request])["r", 0]
    assert again.num_cached >= 16
    same(again, expected)
    rng = np.random.default_rng(1)
    others = [
        Request(f"n{i}", tuple(map(int, rng.integers(0, 200, rng.integers(1, 40)))), SamplingParams(max_tokens=9))
        for i in range(5)
    ]
    same(drive(engine, [*others[:3], request, *others[3:]])["r", 0], expected)
    for every in (2, 3, 5):
        forget_prefixes(engine)
        same(drive(engine, [request], before_step=preempting(engine, every))["r", 0], expected)
    for count in (1, 6, 13):
        forget_prefixes(engine)
        resumed = replace(request, generated=(tuple(expected.token_ids[:count]),))
        assert drive(engine, [resumed])["r", 0].token_ids == expected.token_ids[count:]


def same(one: Result, other: Result) -> None:
    assert one.token_ids == other.token_ids
    mine, theirs = ([entry.logprob for entry in result.logprobs] for result in (one, other))
    np.testing.assert_allclose(mine, theirs, atol=1e-4)


@pytest.mark.parametrize("dtype", [INT8, slow(FP8)])
def test_8_bits_cost_the_demo_model_next_to_no_perplexity(dtype: str) -> None:
    """The answers are to held-out problems, each asked alone and three in a conversation."""
    tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    problems = [held_out_problems(task, 12, seed=5) for task in TASKS]
    examples = [Example((problem,)) for some in problems for problem in some]
    examples += [Example(tuple(some[:3])) for some in problems]
    texts = [encode(example, tokenizer) for example in examples]
    config = EngineConfig(max_num_seqs=4, max_batch_tokens=64, num_pages=80, max_model_len=480, decode_steps=1)
    exact, narrow = (
        perplexity(Engine.from_checkpoint(MODEL_DIR, replace(config, kv_cache_dtype=kept)), texts)
        for kept in ("auto", dtype)
    )
    assert exact < 1.05  # the model knows them
    assert narrow < 1.005 * exact
    assert narrow != exact


def perplexity(engine: Engine, texts: list[Encoded]) -> float:
    """Returns the perplexity of the texts' answers."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    for i, text in enumerate(texts):
        engine.add(Request(str(i), tuple(text.token_ids), params))
    logprobs: list[float] = []
    while engine.has_work():
        for output in engine.step():
            if output.prompt_logprobs is not None:
                trained = texts[int(output.request_id)].trained
                of_answers = zip(output.prompt_logprobs, trained, strict=True)
                logprobs += [entry.logprob for entry, counts in of_answers if counts and entry is not None]
    assert len(logprobs) == sum(sum(text.trained) for text in texts)
    return math.exp(-sum(logprobs) / len(logprobs))
