"""States at page ends are kept and found however small a step is beside a page, and change no bit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.engine import Engine, Request
from penstock.engine.scheduling import scheduler
from tests.engine.engines import SMALL, drive, forget_prefixes, write_model
from tests.engine.whole.test_engine_states import GREEDY, HYBRIDS, alone, assert_all_is_back, prompts, same

pytestmark = pytest.mark.usefixtures("as_shipped")

LONGEST = 52
SHORT = replace(GREEDY, max_tokens=3)


@pytest.fixture(scope="module", params=[("lfm2", 4, "float32"), ("qwen3_next", 24, "bfloat16")], ids=str)
def engine(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Engine:
    family, page_size, dtype = request.param
    directory = write_model(tmp_path_factory.mktemp("hybrid"), family, **HYBRIDS[family])
    assert SMALL.max_model_len is not None
    num_pages = 1 + 6 * -(-SMALL.max_model_len // page_size)
    config = replace(SMALL, dtype=dtype, page_size=page_size, num_pages=num_pages, state_slots=num_pages)
    return Engine.from_checkpoint(directory, config)


@pytest.mark.parametrize("chunk", [3, 4, 5, 16])
def test_a_prompt_begins_at_the_last_page_whose_state_was_kept(
    engine: Engine, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States are kept at each interval of a longer prompt and at the last page of its own copy, beside a decoding
    sequence.
    """
    size, interval, whole = engine._pool.page_size, engine._pool.state_interval, scheduler._chunk
    prompt = tuple(range(7, 7 + LONGEST))
    kept = {*range(interval * size, LONGEST, interval * size), (LONGEST - 1) // size * size}
    followers = [Request(f"r{end}", (*prompt[:end], 3), SHORT) for end in sorted(kept)]
    followers.append(Request("copy", prompt, SHORT))
    forget_prefixes(engine)
    expected = {request.id: alone(engine, request)[0] for request in followers}
    monkeypatch.setattr(scheduler, "_chunk", lambda *arguments: min(chunk, whole(*arguments)))
    beside = Request("beside", prompts(1, 9)[0], replace(GREEDY, max_tokens=25))
    first = drive(engine, [beside, Request("first", prompt, SHORT)])["first", 0]
    same(first, expected["copy"])
    assert first.num_cached == 0
    for request in followers:
        found = drive(engine, [request])[request.id, 0]
        same(found, expected[request.id])
        assert found.num_cached == (len(request.prompt_token_ids) - 1) // size * size
    forget_prefixes(engine)
    assert_all_is_back(engine)
