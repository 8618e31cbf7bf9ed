"""Warm-up: compiles and times every step before the first request; the times decide how steps are composed."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from penstock.engine.execution.geometry import Geometry
from penstock.engine.execution.packing import Batch
from penstock.engine.execution.runner import Runner
from penstock.engine.execution.sampling.options import SamplingBatch, neutral_options
from penstock.engine.execution.sampling_rows import NOT_A_TOKEN
from penstock.engine.execution.step_memory import Measured, StepMemory
from penstock.engine.progress import ReportProgress
from penstock.engine.scheduling.pace import Pace, StepTimes

LOOP_STEPS = 8
"""Decode steps in one dispatch, if that pays."""

LONGEST_LOOP_S = 0.01
"""A longer dispatch would show in the stream and make a new request wait."""

_BRIEF_S = 0.05
"""A step measured at an earlier start runs once more if it takes no longer than this. So its first run is not a
request's, and the shorter time is kept.
"""

_FEW = (1, 4)
"""Numbers of sampled rows below the smallest bucket whose steps are measured too: there drafts pay most."""

_REPEATS = 3  # the shortest counts: other work on the machine only adds time
_ENOUGH_S = 0.2  # steps that take this long are not repeated


def warm_up(
    runner: Runner,
    progress: ReportProgress | None = None,
    *,
    decode_steps: int | None,
    prefill_share: float,
    memory: StepMemory,
) -> Pace:
    """Compiles every step, runs each on padding, and measures those that no earlier start has measured.

    `decode_steps` is the number in one dispatch. If it is None, row buckets get several if these are faster and short.
    """
    runner.compile_steps(progress)
    kept = memory.recall()
    if kept is None:
        runner.move_to_huge_pages(wait=True)
    times = measure_steps(runner) if kept is None else measure_again(runner, kept.times)
    if decode_steps is not None:
        loops = dict.fromkeys(runner.geometry.row_buckets, decode_steps) if decode_steps > 1 else {}
    elif kept is None:
        loops = choose_decode_steps(runner, times)
    else:
        loops = dict(kept.loops)
    memory.keep(Measured(times, loops))
    runner.compile_loops(loops, progress)
    if kept is not None:
        runner.move_to_huge_pages(wait=bool(loops))
    loop_s = {num_rows: _fastest_looped(runner, num_rows, num_steps) for num_rows, num_steps in loops.items()}
    runner.start_watch()
    return Pace(replace(times, loop_s=loop_s), prefill_share, loops)


def measure_steps(runner: Runner) -> StepTimes:
    geometry = runner.geometry
    for num_rows in geometry.extended_row_buckets:  # so that no first run is timed
        runner.dispatch(_decode_batch(geometry, num_rows, extended=True)).token_ids()
    prompt_s = {bucket: _fastest(runner, _prompt_batch(geometry, bucket)) for bucket in geometry.token_buckets}
    decode_s = {bucket: _fastest(runner, _decode_batch(geometry, bucket)) for bucket in geometry.row_buckets}
    few_s = {
        count: _fastest(runner, _decode_batch(geometry, geometry.row_buckets[0], num_seqs=count)) for count in _FEW
    }
    return StepTimes(prompt_s, decode_s, _pair_s(runner, prompt_s[geometry.token_buckets[0]]), few_s)


def measure_again(runner: Runner, kept: StepTimes) -> StepTimes:
    """Runs the brief steps once; the shorter of both times counts."""
    geometry = runner.geometry
    for num_rows in geometry.extended_row_buckets:
        if kept.decode_s[num_rows] <= _BRIEF_S:
            _seconds(runner, _decode_batch(geometry, num_rows, extended=True))
    prompt_s = {
        bucket: min(known_s, _seconds(runner, _prompt_batch(geometry, bucket))) if known_s <= _BRIEF_S else known_s
        for bucket, known_s in kept.prompt_s.items()
    }
    decode_s = {
        bucket: min(known_s, _seconds(runner, _decode_batch(geometry, bucket))) if known_s <= _BRIEF_S else known_s
        for bucket, known_s in kept.decode_s.items()
    }
    return replace(kept, prompt_s=prompt_s, decode_s=decode_s)


def choose_decode_steps(runner: Runner, times: StepTimes) -> dict[int, int]:
    """Returns decode steps by row bucket: several where they stay short, if a lone sequence gains a tenth or more."""
    short = [rows for rows, seconds in times.decode_s.items() if seconds * LOOP_STEPS <= LONGEST_LOOP_S]
    if not short:
        return {}
    single_s = min(time_decoding(runner, short[0], 1) for _ in range(_REPEATS))
    time_decoding(runner, short[0], LOOP_STEPS)  # compiles
    loop_s = min(time_decoding(runner, short[0], LOOP_STEPS) for _ in range(_REPEATS))
    return dict.fromkeys(short, LOOP_STEPS) if loop_s < 0.9 * single_s else {}


def time_decoding(runner: Runner, num_rows: int, num_steps: int) -> float:
    """Returns one sequence's seconds for LOOP_STEPS tokens in dispatches of `num_steps`, waiting only for the last."""
    batch = _decode_batch(runner.geometry, num_rows, num_steps=num_steps)
    start = time.perf_counter()
    for _ in range(max(1, LOOP_STEPS // num_steps)):
        last = runner.dispatch(batch)
    last.token_ids()
    return time.perf_counter() - start


def _fastest_looped(runner: Runner, num_rows: int, num_steps: int) -> float:
    """Returns the seconds of one of several decode steps in a dispatch."""
    num_tokens = max(1, LOOP_STEPS // num_steps) * num_steps
    time_decoding(runner, num_rows, num_steps)  # so that no first run is timed
    return min(time_decoding(runner, num_rows, num_steps) for _ in range(_REPEATS)) / num_tokens


def _pair_s(runner: Runner, alone_s: float) -> float:
    """Returns the seconds beyond `alone_s` that the smallest chunk takes at the longest prompt's end, per pair."""
    geometry = runner.geometry
    count = geometry.token_buckets[0]
    context = geometry.max_model_len - count
    if context <= 0:
        return 0.0
    longer_s = _fastest(runner, _prompt_batch(geometry, count, context))
    return max(0.0, longer_s - alone_s) / (count * context)


def _fastest(runner: Runner, batch: Batch) -> float:
    seconds: list[float] = []
    while len(seconds) <= _REPEATS and sum(seconds[1:]) < _ENOUGH_S:  # the first run includes setup
        seconds.append(_seconds(runner, batch))
    return min(seconds)


def _seconds(runner: Runner, batch: Batch) -> float:
    start = time.perf_counter()
    runner.dispatch(batch).token_ids()
    return time.perf_counter() - start


def _prompt_batch(geometry: Geometry, num_tokens: int, context: int = 0) -> Batch:
    """Returns a chunk of one prompt after `context` other tokens, all of it in the sink page."""
    flat, parts = geometry.step_layout(num_tokens).empty()
    parts["sources"][:] = -1
    parts["positions"][:] = context + np.arange(num_tokens)
    parts["cu_q_lens"][1:] = num_tokens
    parts["kv_lens"][0], parts["num_seqs"][0] = context + num_tokens, 1
    parts["sampled_tokens"][0], parts["num_sampled"][0] = num_tokens - 1, 1
    return Batch(num_tokens, geometry.row_buckets[0], 1, 1, flat, None, None)


def _decode_batch(
    geometry: Geometry, num_rows: int, *, num_seqs: int | None = None, num_steps: int = 1, extended: bool = False
) -> Batch:
    """Returns first tokens of `num_seqs` sequences in the sink page: one per row, or one with several steps."""
    if num_seqs is None:
        num_seqs = 1 if num_steps > 1 else num_rows
    flat, parts = geometry.step_layout(num_rows).empty()
    parts["sources"][:] = -1
    parts["cu_q_lens"][1:] = np.minimum(np.arange(1, num_rows + 1), num_seqs)
    parts["kv_lens"][:num_seqs], parts["num_seqs"][0] = 1, num_seqs
    parts["sampled_tokens"][:num_seqs], parts["num_sampled"][0] = np.arange(num_seqs), num_seqs
    options = SamplingBatch(neutral_options(geometry, num_rows)[0], (), True) if extended else None
    stops = None
    if num_steps > 1:
        stops, ends = geometry.stops_layout(num_rows).empty()
        ends["stop_ids"][:], ends["limits"][0] = NOT_A_TOKEN, num_steps
    return Batch(num_rows, num_rows, num_steps, num_seqs, flat, options, stops)
