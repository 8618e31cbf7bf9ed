"""A model with recurrent states gives the same tokens, and log-probabilities to the bit, however the prompt was cut."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.engine import ConfigError, Engine, EngineConfig, Request, SamplingParams
from penstock.engine.deployment.cache_sizes import fitting, with_pages
from penstock.engine.deployment.deployment import deploy
from penstock.engine.execution.packing import Batch
from penstock.engine.execution.runner import InFlight
from penstock.engine.loading.checkpoint import read_model_config
from penstock.engine.models import FAMILIES
from penstock.engine.scheduling import scheduler
from penstock.engine.scheduling.memory.amounts import Amount
from penstock.engine.scheduling.pace import Pace
from penstock.engine.sharding.placement import split_model
from penstock.engine.speculation.acceptance import Acceptance
from tests.engine.engines import (
    SMALL,
    VOCAB_SIZE,
    Result,
    Results,
    all_pages_are_free,
    drive,
    forget_prefixes,
    preempt_all,
    write_model,
)
from tests.engine.speculation.drafters import TrueContinuation
from tests.engine.whole.test_engine_invariance import ENDINGS, LETTERS, PARAMS, PROMPT
from tests.support.patience import slow

pytestmark = pytest.mark.usefixtures("as_shipped")

CONVOLUTIONS = {"num_hidden_layers": 4, "full_attn_idxs": [1, 3], "conv_L_cache": 4, "conv_bias": True}
DELTA_NETS = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 28,
}
HYBRIDS = {"lfm2": CONVOLUTIONS, "qwen3_next": DELTA_NETS}

# Each test meets both kinds of states and both dtypes. Their other pairs are slow, but for the first test's.
PAIRS = [("lfm2", "float32"), ("qwen3_next", "bfloat16")]
OTHER_PAIRS = [("lfm2", "bfloat16"), ("qwen3_next", "float32")]
FLOAT16 = [slow((family, "float16")) for family in HYBRIDS]
GREEDY = SamplingParams(temperature=0.0, max_tokens=14, logprobs=1, ignore_eos=True)


@pytest.fixture(scope="module")
def convolutions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("convolutions"), "lfm2", **CONVOLUTIONS)


@pytest.fixture(scope="module", params=HYBRIDS)
def hybrid(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    return write_model(tmp_path_factory.mktemp("hybrid"), request.param, **HYBRIDS[request.param])


@pytest.fixture(scope="module", params=[*PAIRS, *map(slow, OTHER_PAIRS), *FLOAT16], ids="-".join)
def shared(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Engine:
    family, dtype = request.param
    model = write_model(tmp_path_factory.mktemp("shared"), family, **HYBRIDS[family])
    return Engine.from_checkpoint(model, replace(SMALL, dtype=dtype))


@pytest.fixture
def engine(shared: Engine) -> Iterator[Engine]:
    """The engine, idle, with nothing cached; at the end every page and slot must be free."""
    forget_prefixes(shared)
    yield shared
    assert not shared.has_work()
    assert_all_is_back(shared)


def assert_all_is_back(engine: Engine) -> None:
    stats = engine.stats()
    assert all_pages_are_free(engine)
    assert stats.num_free_state_slots + stats.num_cached_state_slots == stats.num_state_slots
    assert engine._pool.states.num_references == 0


def same(one: Result, other: Result) -> None:
    assert (one.token_ids, one.text, one.finish_reason) == (other.token_ids, other.text, other.finish_reason)
    assert [entry.logprob for entry in one.logprobs] == [entry.logprob for entry in other.logprobs]


def alone(engine: Engine, request: Request) -> list[Result]:
    results = drive(engine, [request])
    forget_prefixes(engine)
    return [results[request.id, index] for index in range(request.n)]


def prompts(number: int, longest: int = 60, seed: int = 2) -> list[tuple[int, ...]]:
    rng = np.random.default_rng(seed)
    return [tuple(map(int, rng.integers(0, VOCAB_SIZE, rng.integers(1, longest)))) for _ in range(number)]


@pytest.mark.parametrize("shared", [*PAIRS, *OTHER_PAIRS, *FLOAT16], indirect=True, ids="-".join)
def test_in_company_and_in_chunks_of_any_size(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [Request(f"r{i}", prompt, GREEDY) for i, prompt in enumerate(prompts(9))]
    expected = {request.id: alone(engine, request)[0] for request in requests}
    chunk, rng = scheduler._chunk, random.Random(3)

    def small(*arguments: object) -> int:
        return min(chunk(*arguments), rng.randint(1, 9))  # type: ignore[arg-type]

    monkeypatch.setattr(scheduler, "_chunk", small)
    for _ in range(3):
        results = drive(engine, requests)
        forget_prefixes(engine)
        for request in requests:
            same(results[request.id, 0], expected[request.id])


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_preempted_at_every_step_and_resumed_at_every_token(engine: Engine, params: SamplingParams) -> None:
    request = Request("r", PROMPT, replace(params, logprobs=2), n=2)
    expected = alone(engine, request)
    for at in range(18):

        def preempt(step: int, at: int = at) -> None:
            if step == at:
                preempt_all(engine)

        results = drive(engine, [request], before_step=preempt)
        for index in range(2):
            same(results["r", index], expected[index])
        if at % 2:  # otherwise it may begin with its kept state
            forget_prefixes(engine)
    for done in range(len(expected[0].token_ids) + 1):
        other = min(done + 3, len(expected[1].token_ids))
        generated = (tuple(expected[0].token_ids[:done]), tuple(expected[1].token_ids[:other]))
        rest = drive(engine, [replace(request, generated=generated)])
        for index, tokens in enumerate(generated):
            assert rest["r", index].token_ids == expected[index].token_ids[len(tokens) :]
            ours = [entry.logprob for entry in rest["r", index].logprobs]
            assert ours == [entry.logprob for entry in expected[index].logprobs[len(tokens) :]]


@pytest.mark.parametrize("ending", ENDINGS)
def test_every_way_to_end(engine: Engine, ending: str) -> None:
    params = replace(ENDINGS[ending], seed=5, allowed_token_ids=LETTERS, ignore_eos=True, frequency_penalty=0.4)
    request = Request("r", PROMPT, params, n=2)
    expected = alone(engine, request)
    for cut in range(max(len(choice.token_ids) for choice in expected)):
        generated = tuple(tuple(choice.token_ids[:cut]) for choice in expected)
        results = drive(engine, [replace(request, generated=generated), Request("other", PROMPT[3:], GREEDY)])
        for index, choice in enumerate(expected):
            assert results["r", index].token_ids == choice.token_ids[cut:]
            assert results["r", index].finish_reason == choice.finish_reason


def test_prefixes_that_are_found(engine: Engine) -> None:
    """Prefixes of prompts are found at each page and in between; those of replies too."""
    whole = prompts(1, 61, seed=8)[0] * 2
    whole = whole[:60]
    for length in range(1, 60, 3):
        request = Request(f"r{length}", (*whole[:length], 3, 1), GREEDY)
        expected = alone(engine, request)[0]
        drive(engine, [Request("before", whole, GREEDY)])
        found = drive(engine, [request])["r" + str(length), 0]
        same(found, expected)
        drive(engine, [Request("between", (*whole[:length], 9), GREEDY)])
        same(drive(engine, [request])["r" + str(length), 0], expected)
        forget_prefixes(engine)
    first = drive(engine, [Request("first", whole[:30], replace(GREEDY, max_tokens=30))])["first", 0]
    turn = Request("second", (*whole[:30], *first.token_ids, 7, 8, 9), GREEDY)
    found = drive(engine, [turn])["second", 0]
    assert found.num_cached >= 48
    forget_prefixes(engine)
    same(found, alone(engine, turn)[0])


@pytest.mark.parametrize(("hybrid", "dtype"), [*PAIRS, *(slow(*pair) for pair in OTHER_PAIRS)], indirect=["hybrid"])
def test_several_steps_in_one_dispatch(hybrid: Path, dtype: str) -> None:
    single, looping = (
        Engine.from_checkpoint(hybrid, replace(SMALL, dtype=dtype, decode_steps=steps, num_pages=300))
        for steps in (1, 8)
    )
    params = replace(GREEDY, max_tokens=40, logprobs=None)
    requests = [Request(f"r{i}", prompt, params) for i, prompt in enumerate(prompts(4, 30))]
    requests += [replace(requests[0], id="n", sampling=replace(PARAMS["seeded"], max_tokens=33), n=2)]
    expected = drive(single, requests)
    stops = {request.id: (expected[request.id, 0].token_ids[11 + i],) for i, request in enumerate(requests)}
    ending = [replace(r, sampling=replace(r.sampling, stop_token_ids=stops[r.id])) for r in requests]
    for batch in ([requests[0]], requests, ending, requests[::-1]):
        results, same_results = drive(looping, batch), drive(single, batch)
        assert {key: r.token_ids for key, r in results.items()} == {key: r.token_ids for key, r in same_results.items()}
    turns = [Request(f"t{r.id}", (*r.prompt_token_ids, *results[r.id, 0].token_ids, 5), params) for r in requests]
    found = drive(looping, turns)
    assert sum(result.num_cached for result in found.values()) > 100
    forget_prefixes(single)
    fresh = drive(single, turns)
    assert {key: r.token_ids for key, r in found.items()} == {key: r.token_ids for key, r in fresh.items()}
    for engine in (single, looping):
        assert_all_is_back(engine)


@pytest.mark.parametrize("acceptance", [1.0, 0.6, 0.0])
def test_drafts_right_and_wrong(engine: Engine, monkeypatch: pytest.MonkeyPatch, acceptance: float) -> None:
    monkeypatch.setattr(Acceptance, "chance", 0.9)
    monkeypatch.setattr(engine, "_pace", Pace())
    requests = [Request(f"r{i}", prompt, replace(GREEDY, max_tokens=30)) for i, prompt in enumerate(prompts(5))]
    before = engine._speculation
    engine.speculate(None)
    expected = drive(engine, requests)
    forget_prefixes(engine)
    engine.speculate(TrueContinuation({key: result.token_ids for key, result in expected.items()}, acceptance))
    drafted = engine.stats().drafted_tokens_total
    for request in requests:
        same(drive(engine, [request])[request.id, 0], expected[request.id, 0])
    results = drive(engine, requests)  # with the prefixes that drafts left behind
    for request in requests:
        same(results[request.id, 0], expected[request.id, 0])
    assert engine.stats().drafted_tokens_total > drafted
    engine._speculation = before


def test_more_requests_than_states(hybrid: Path) -> None:
    engine = Engine.from_checkpoint(hybrid, replace(SMALL, state_slots=2, num_pages=200))
    assert engine.describe().num_state_slots == 2
    requests = [Request(f"r{i}", prompt, replace(GREEDY, max_tokens=5)) for i, prompt in enumerate(prompts(30, 20))]
    most = 0

    def watch(step: int) -> None:
        nonlocal most
        most = max(most, engine.stats().num_running)

    results = drive(engine, requests, before_step=watch)
    assert most == 2
    wide = Engine.from_checkpoint(hybrid, SMALL)
    expected = drive(wide, requests)
    for request in requests:
        same(results[request.id, 0], expected[request.id, 0])
    assert engine.stats().preemptions_total == 0
    assert_all_is_back(engine)


class Failing:
    """Makes some dispatches of a runner raise."""

    def __init__(self, dispatch: Callable[[Batch], InFlight], at: set[int]) -> None:
        self._dispatch, self._at, self._numbers = dispatch, at, count()

    def __call__(self, batch: Batch) -> InFlight:
        if next(self._numbers) in self._at:
            raise RuntimeError("the device is gone")
        return self._dispatch(batch)


def test_shared_prefixes_in_a_tiny_pool_with_failures_and_aborts(hybrid: Path) -> None:
    rng = random.Random(0)
    engine = Engine.from_checkpoint(hybrid, replace(SMALL, num_pages=34, state_slots=6))
    shared = prompts(3, 40, seed=5)
    requests = [
        Request(
            f"r{i}", (*rng.choice(shared)[: rng.randint(1, 40)], *prompts(1, 9, seed=i)[0]),
            replace(GREEDY, max_tokens=rng.randint(1, 30)), n=1 + (i % 4 == 0),
        )
        for i in range(60)
    ]  # fmt: skip
    calm = Engine.from_checkpoint(hybrid, SMALL)
    expected: Results = drive(calm, requests)
    engine._runner.dispatch = Failing(engine._runner.dispatch, {7, 40, 41, 90, 200})  # type: ignore[method-assign]
    gone = {f"r{i}" for i in range(0, 60, 7)}

    def disturb(step: int) -> None:
        if step % 11 == 5 and gone:
            engine.abort(gone.pop())
        if step % 13 == 7 and engine._scheduler.running:
            engine._scheduler._preempt(engine._scheduler.running[-1])

    results = drive(engine, requests, before_step=disturb)
    for key, result in results.items():
        if result.finish_reason not in ("cancelled", "error"):
            same(result, expected[key])
        else:
            assert result.token_ids == expected[key].token_ids[: len(result.token_ids)]
    assert sum(result.num_cached for result in results.values()) > 0
    assert engine.stats().faults_total == 5
    assert engine.stats().preemptions_total > 0
    assert_all_is_back(engine)


def test_memory_is_as_counted_by_hand(convolutions: Path) -> None:
    """Two layers keep three inputs of 48 channels in f32. In the other layers a page has four tokens, of two heads of
    12.
    """
    engine = Engine.from_checkpoint(convolutions, SMALL)
    info, slot_bytes, page_bytes = engine.describe(), 2 * 3 * 48 * 4, 2 * 2 * 4 * 2 * 12 * 4
    assert info.state_cache_bytes == (info.num_state_slots + 1) * slot_bytes
    assert info.kv_cache_bytes == 64 * page_bytes
    assert info.num_state_slots == 4 + 64 // -(-4 * slot_bytes // page_bytes)
    held = sum(array.nbytes for states in engine._runner._cache[2:] for array in states)
    assert held == info.state_cache_bytes
    asked = replace(SMALL, num_pages=None, kv_cache_bytes=100_000, prefix_caching=False)
    info = Engine.from_checkpoint(convolutions, asked).describe()
    assert info.num_state_slots == 4
    assert (
        info.kv_cache_bytes + info.state_cache_bytes
        <= 100_000
        < info.kv_cache_bytes + info.state_cache_bytes + page_bytes
    )


def test_memory_of_delta_nets_is_as_counted_by_hand(tmp_path: Path) -> None:
    """A layer keeps four matrices of 6 x 10 in f32, and three inputs of two heads of queries, two of keys and four of
    values.
    """
    directory = write_model(tmp_path, "qwen3_next", **DELTA_NETS)
    engine = Engine.from_checkpoint(directory, replace(SMALL, dtype="bfloat16"))
    info, slot_bytes = engine.describe(), 4 * 6 * 10 * 4 + 3 * (2 * 2 * 6 + 4 * 10) * 2
    assert info.state_cache_bytes == (info.num_state_slots + 1) * slot_bytes
    assert sum(array.nbytes for states in engine._runner._cache[1:] for array in states) == info.state_cache_bytes


def test_a_large_state_takes_a_quarter_of_the_memory_of_prefixes() -> None:
    """Qwen3.5 9B has 24 layers of 32 matrices of 128 x 128, which are 48 MiB, and of three inputs of 8,192 channels.

    A token has 32 KiB of keys and values, in 8 layers of 4 heads of 256.
    """
    sizes = {"hidden_size": 4096, "intermediate_size": 12_288, "num_attention_heads": 16, "num_hidden_layers": 32}
    model = FAMILIES["qwen3_5_text"].config({**sizes, "vocab_size": 248_320}, "bfloat16")
    config = EngineConfig(max_num_seqs=8, max_batch_tokens=16, page_size=32, max_model_len=32_768, kv_cache_bytes=2**35)
    deployment = deploy(config, model)
    assert deployment.state_bytes == 48 * 2**20 + 24 * 3 * 8192 * 2
    assert deployment.page_bytes == 2**20
    assert deployment.state_interval == 197  # 4 x 49.125, rounded up
    spec = fitting(deployment, 2**35)
    kept = spec.num_states - 8 - 1  # beside one of each sequence that runs, and the sink
    assert kept == deployment.kept_states(Amount.of(spec.num_pages)) == spec.num_pages // 197
    assert 0.24 < kept * deployment.state_bytes / (spec.num_pages * deployment.page_bytes) <= 0.25
    assert spec.num_states * deployment.state_bytes + spec.num_pages * deployment.page_bytes <= 2**35


def test_heads_that_devices_do_not_divide_are_refused() -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 8, "num_attention_heads": 8, "num_hidden_layers": 4}
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 8, "vocab_size": 16}
    model = FAMILIES["qwen3_5_text"].config({**sizes, **heads}, "float32")
    with pytest.raises(
        ConfigError, match=r"tensor_parallel = 4 does not divide the model's 2 key heads of a state; 1, 2"
    ):
        split_model(model, 4)


@pytest.mark.parametrize(
    ("hybrid", "config", "held"),
    [
        ("lfm2", {"matmul": "xla"}, "float32"),
        ("qwen3_next", {"decode_steps": 4}, "int8"),
        slow("lfm2", {"decode_steps": 4}, "int8"),
        slow("qwen3_next", {"matmul": "xla"}, "float32"),
    ],
    indirect=["hybrid"],
)
def test_states_are_updated_where_they_are_and_weights_may_be_quantized(
    hybrid: Path, config: dict[str, Any], held: str
) -> None:
    weights = "auto" if held == "float32" else held
    engine = Engine.from_checkpoint(hybrid, replace(SMALL, weights=weights, **config))
    memory = engine._runner.compile_backbone(16).memory_analysis()
    info = engine.describe()
    assert memory is not None
    assert memory.alias_size_in_bytes >= info.kv_cache_bytes + info.state_cache_bytes
    requests = [Request(f"r{i}", prompt, GREEDY) for i, prompt in enumerate(prompts(5))]
    expected = {request.id: alone(engine, request)[0] for request in requests}
    results = drive(engine, requests)
    for request in requests:
        assert results[request.id, 0].token_ids == expected[request.id].token_ids


def test_half_of_a_small_memory_is_for_sequences_that_run(convolutions: Path) -> None:
    deployment = deploy(replace(SMALL, num_pages=None, max_num_seqs=16), read_model_config(convolutions))
    slot = deployment.state_bytes
    assert (slot, deployment.page_bytes, deployment.state_interval) == (1152, 1536, 3)
    spec = fitting(deployment, 10 * slot)
    assert (spec.num_states, spec.num_pages) == (5 + 1, 3)  # a page takes a third of a slot with it
    with pytest.raises(ConfigError, match=f"holds 0 pages .* at least; 2 states have {2 * slot}"):
        with_pages(deployment, 2 * slot)


def test_slots_for_a_model_without_states_are_refused(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="state_slots = 3, and no layer"):
        Engine.from_checkpoint(tiny_model, replace(SMALL, state_slots=3))
