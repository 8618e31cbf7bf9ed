"""Layers with two kinds of pages, some of which read the keys and values of others.

Tokens are the same to the bit, however prompts are cut, and every page of either kind is freed.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from penstock.engine import Engine, Request, SamplingParams
from penstock.engine.deployment.cache_sizes import with_pages
from penstock.engine.deployment.deployment import Deployment, deploy
from penstock.engine.errors import CheckpointError
from penstock.engine.execution.runner import InFlight
from penstock.engine.loading.checkpoint import check_weights, read_model_config
from penstock.engine.models import layer_groups
from penstock.engine.scheduling import scheduler
from penstock.engine.scheduling.memory.amounts import Amount
from penstock.tools.plan.device.roofline import kv_sequence_bytes, kv_token_bytes
from tests.engine.engines import SMALL, VOCAB_SIZE, Result, drive, forget_prefixes, preempt_all, write_model
from tests.support.patience import slow

pytestmark = pytest.mark.usefixtures("as_shipped")

WINDOW = 7
SHARING = {
    "num_hidden_layers": 5,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 12,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "sliding_window": WINDOW,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, logprobs=1, ignore_eos=True)
PROMPT = tuple(map(int, np.random.default_rng(5).integers(0, VOCAB_SIZE, 31)))


@pytest.fixture(scope="module")
def sharing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("sharing"), "gemma4_text", **SHARING)


@pytest.fixture(scope="module", params=["float32", slow("bfloat16")])
def shared(sharing: Path, request: pytest.FixtureRequest) -> Engine:
    return Engine.from_checkpoint(sharing, replace(SMALL, dtype=request.param))


@pytest.fixture
def engine(shared: Engine) -> Iterator[Engine]:
    """The engine, idle, with nothing cached; at the end every page must be free."""
    forget_prefixes(shared)
    yield shared
    assert not shared.has_work()
    assert_all_is_back(shared)


def assert_all_is_back(engine: Engine) -> None:
    pool = engine._pool
    assert pool.available == Amount(tuple(store.num_pages - 1 for store in pool.stores))
    stats = engine.stats()
    assert stats.num_free_pages + stats.num_cached_pages == stats.num_pages == pool.available.total
    assert [kind.num_pages for kind in stats.kinds] == [store.num_pages - 1 for store in pool.stores]
    assert all(kind.num_free + kind.num_cached == kind.num_pages for kind in stats.kinds)


def same(one: Result, other: Result) -> None:
    assert (one.token_ids, one.finish_reason) == (other.token_ids, other.finish_reason)
    assert [entry.logprob for entry in one.logprobs] == [entry.logprob for entry in other.logprobs]


def alone(engine: Engine, request: Request) -> list[Result]:
    results = drive(engine, [request])
    forget_prefixes(engine)
    return [results[request.id, index] for index in range(request.n)]


def test_layers_that_read_others_own_nothing(sharing: Path) -> None:
    config = read_model_config(sharing)
    groups = layer_groups(config)
    assert [(kind.num_kv_heads, kind.head_dim, kind.size) for kind in groups.page_kinds] == [(2, 16, 2), (1, 24, 1)]
    assert (groups.windows, groups.kinds) == ((WINDOW, None), (0, 1))
    assert groups.places[3:] == groups.places[1:3]
    deployment = deployed(sharing, page_size=4)
    assert deployment.kind_bytes == (4 * 2 * 2 * 2 * 16 * 4, 4 * 2 * 1 * 1 * 24 * 4)
    assert deployment.page_bytes == sum(deployment.kind_bytes)
    engine = Engine.from_checkpoint(sharing, SMALL)
    arrays = [array.shape for pages in engine._runner._cache for array in pages]
    assert len(arrays) == 2 * 3  # keys and values of the three layers that have such
    assert engine.describe().kv_cache_bytes == 64 * deployment.page_bytes
    assert sum(array.nbytes for pages in engine._runner._cache for array in pages) == 64 * deployment.page_bytes
    assert kv_token_bytes(config, "float32") * 4 == deployment.page_bytes
    # Read are those of all layers, whoever has them.
    of_window, of_full = 2 * 2 * 16 * 4, 2 * 24 * 4
    assert kv_sequence_bytes(config, "float32", 100) == 3 * WINDOW * of_window + 2 * 100 * of_full


def test_keys_and_values_that_nothing_reads_are_passed_over(sharing: Path, tmp_path: Path) -> None:
    """Published checkpoints have them, for layers that read the keys and values of other layers."""
    directory = shutil.copytree(sharing, tmp_path / "more")
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for name in ("k_proj", "k_norm"):
        tensors[f"model.layers.3.self_attn.{name}.weight"] = np.zeros(3, np.float32)
    save_file(tensors, file, metadata={"format": "pt"})
    config = read_model_config(directory)
    assert check_weights(directory, config) == check_weights(sharing, config)
    tensors["model.layers.2.self_attn.v_proj.weight"] = np.zeros(3, np.float32)  # its values are keys
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.layers\.2\.self_attn\.v_proj\.weight"):
        check_weights(directory, config)


def test_chunks_that_end_anywhere(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks end at each end of a page and of a window, and everywhere else."""
    request = Request("r", PROMPT, GREEDY)
    (expected,) = alone(engine, request)
    chunk = scheduler._chunk
    for end in range(1, len(PROMPT)):

        def cut(sequence: Any, *others: Any, end: int = end) -> int:
            count = chunk(sequence, *others)
            return min(count, end - sequence.num_computed) if sequence.num_computed < end else count

        monkeypatch.setattr(scheduler, "_chunk", cut)
        same(alone(engine, request)[0], expected)


def test_prefixes_that_are_found(engine: Engine) -> None:
    for length in range(1, len(PROMPT), 2):
        request = Request("r", (*PROMPT[:length], 3, 1), GREEDY)
        (expected,) = alone(engine, request)
        drive(engine, [Request("before", PROMPT, GREEDY)])
        found = drive(engine, [request])["r", 0]
        assert found.num_cached == length // 4 * 4
        same(found, expected)
        forget_prefixes(engine)


def test_choices_share_their_prompt_and_each_is_preempted_resumed_and_aborted(engine: Engine) -> None:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=10, logprobs=1, ignore_eos=True)
    request = Request("r", PROMPT, params, n=3)
    expected = alone(engine, request)
    for at in range(1, 9, 2):

        def preempt(step: int, at: int = at) -> None:
            if step == at:
                preempt_all(engine)

        results = drive(engine, [request], before_step=preempt)
        for index in range(3):
            same(results["r", index], expected[index])
        generated = tuple(tuple(choice.token_ids[: at - 1]) for choice in expected)
        rest = drive(engine, [replace(request, generated=generated)])
        for index, tokens in enumerate(generated):
            assert rest["r", index].token_ids == expected[index].token_ids[len(tokens) :]

        def abort(step: int, at: int = at) -> None:
            if step == at:
                engine.abort("r")

        results = drive(engine, [request], before_step=abort)
        assert {results["r", index].finish_reason for index in range(3)} == {"cancelled"}
        engine._pool.check()


def test_a_step_that_fails_costs_no_tokens(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [Request("a", PROMPT, GREEDY), Request("b", PROMPT[9:], GREEDY)]
    expected = {request.id: alone(engine, request)[0] for request in requests}
    token_ids, calls = InFlight.token_ids, [0]

    def failing(step: InFlight) -> list[list[int]]:
        calls[0] += 1
        if calls[0] == 4:  # with both in it
            raise RuntimeError("the device lost it")
        return token_ids(step)

    monkeypatch.setattr(InFlight, "token_ids", failing)
    results = drive(engine, requests)
    for request in requests:
        same(results[request.id, 0], expected[request.id])
    assert calls[0] > 4


@pytest.mark.parametrize("settings", [slow({"decode_steps": 4}), slow({"speculation": "off"}), {"num_pages": 14}])
def test_other_settings_give_the_same_tokens(sharing: Path, shared: Engine, settings: dict[str, Any]) -> None:
    again = PROMPT[:4] * 2  # drafts are made of it
    longer = replace(GREEDY, max_tokens=40)
    requests = [Request("a", PROMPT[:5], longer), Request("b", again, longer), Request("c", PROMPT[3:6], longer)]
    expected = drive(shared, requests)
    dtype = shared.describe().dtype
    other = Engine.from_checkpoint(sharing, replace(SMALL, dtype=dtype, **settings))
    found = drive(other, requests)
    for key, result in expected.items():
        assert found[key].token_ids == result.token_ids
    assert_all_is_back(other)
    if "num_pages" in settings:  # by kind; there are too few of the full layers'
        assert other._pool.num_pages == 2 * 14
        assert other.stats().preemptions_total > 0


@pytest.mark.slow
@pytest.mark.parametrize("kv_cache_dtype", ["int8", "unquantized"])
def test_both_attentions_of_cpus_have_both_kinds(sharing: Path, kv_cache_dtype: str) -> None:
    found = {}
    for attention in ("xla", "native"):
        settings = replace(SMALL, attention=attention, kv_cache_dtype=kv_cache_dtype)
        engine = Engine.from_checkpoint(sharing, settings)
        found[attention] = drive(engine, [Request("r", PROMPT, GREEDY)])["r", 0]
        names = {array.dtype.name for array in jax.tree.leaves(engine._runner._cache)}
        assert ("int8" in names) == (kv_cache_dtype == "int8")
    ours, theirs = ([entry.logprob for entry in found[name].logprobs] for name in ("xla", "native"))
    assert ours == pytest.approx(theirs, abs=0.02 if kv_cache_dtype == "int8" else 1e-4)


def deployed(directory: Path, **settings: int) -> Deployment:
    fixed = {"max_num_seqs": 4, "max_batch_tokens": 16, "page_size": 4, **settings}
    config = replace(SMALL, num_pages=None, attention="xla", matmul="xla", **fixed)  # type: ignore[arg-type]
    return deploy(config, read_model_config(directory))


def test_memory_goes_to_windows_first_and_then_to_what_grows(sharing: Path) -> None:
    here = deployed(sharing)
    sliding, full = here.kind_bytes
    # Of 6 + 1 tokens at most 3 pages while others decode, of 6 + 16 at most 7; and page 0.
    plenty = with_pages(here, 100 * (sliding + full))
    assert plenty.counts == (1 + 4 * 7, 1 + 4 * 24)  # all that can be of use
    least = 1 + 7 + 3 * 3
    some = with_pages(here, 2 * least * sliding)
    assert some.counts == (least, least * sliding // full)
    scarce = with_pages(here, least * sliding)  # a half for each
    assert scarce.counts[0] == least // 2
    assert abs(scarce.counts[0] * sliding - scarce.counts[1] * full) <= sliding + full
    info = here.describe(some)
    assert info.kv_cache_tokens == 4 * (some.counts[1] - 1)
    assert info.kv_cache_bytes == some.counts[0] * sliding + some.counts[1] * full
