"""Slips in sampling and in the text of tokens."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_CODE = "engine/execution/sampling"
_TESTS = "tests/engine/execution"
_TEXT = "tests/engine/text"
_EXTENDED = f"{_TESTS}/test_extended.py"

SAMPLING = (
    Mutant(
        "choices-with-one-seed",
        "the choices of a request are drawn apart",
        "engine/scheduling/sequence.py",
        'blake2b(f"{source}/{index}".encode(), digest_size=8)',
        'blake2b(f"{source}".encode(), digest_size=8)',
        ("tests/engine/scheduling/test_sequence.py::test_seeds_differ_by_choice_and_are_the_same_on_every_worker",),
    ),
    Mutant(
        "same-number-at-every-place",
        "P3: a draw depends on the seed and the output index",
        "engine/execution/sampling_rows.py",
        "jax.random.uniform(jax.random.fold_in(key, output_index))",
        "jax.random.uniform(key)",
        (f"{_TESTS}/test_sampling.py::test_a_draw_depends_on_seed_and_output_index_alone",),
    ),
    Mutant(
        "top-k-keeps-one-more",
        "top_k keeps as many tokens as it says",
        f"{_CODE}/sampling.py",
        "keepdims=True) >= top_k[:, None]",
        "keepdims=True) > top_k[:, None]",
        (f"{_TESTS}/test_sampling.py::test_filters_keep_what_transformers_keeps",),
    ),
    Mutant(
        "top-p-short-of-its-mass",
        "top_p keeps the token that reaches its mass",
        f"{_CODE}/sampling.py",
        "kept = (logits >= jnp.minimum(",
        "kept = (logits > jnp.minimum(",
        (f"{_TESTS}/test_sampling.py::test_filters_keep_what_transformers_keeps",),
    ),
    Mutant(
        "presence-over-the-prompt",
        "presence is penalised over the output alone",
        f"{_CODE}/adjusting.py",
        "rows.presence_penalty[:, None] * (counts > 0)",
        "rows.presence_penalty[:, None] * is_seen",
        (f"{_EXTENDED}::test_penalties_are_those_of_transformers_and_openai",),
    ),
    Mutant(
        "stop-token-comes-late",
        "min_tokens holds stop tokens off for as many tokens as it says",
        f"{_CODE}/adjusting.py",
        "(output_index < rows.min_tokens)[:, None]",
        "(output_index <= rows.min_tokens)[:, None]",
        (f"{_EXTENDED}::test_penalties_are_those_of_transformers_and_openai",),
    ),
    Mutant(
        "log-probability-of-the-best",
        "a token comes with its own log-probability",
        f"{_CODE}/logprobs.py",
        "Logprobs(logits[token_id] - total, top_ids, top - total)",
        "Logprobs(top[0] - total, top_ids, top - total)",
        (f"{_EXTENDED}::test_a_row_with_a_target_gives_it_and_scores_it",),
    ),
    Mutant(
        "stop-held-back-too-little",
        "no part of a stop string is shown",
        "engine/text/stop.py",
        "else len(seen) - state.depth",
        "else len(seen) - max(0, state.depth - 1)",
        (f"{_TEXT}/test_text_stop.py::test_holds_back_only_the_beginning_of_a_stop_string",),
    ),
    Mutant(
        "stop-inside-a-longer-one-missed",
        "a text ends at the first stop string, also inside the beginning of another",
        "engine/text/stop.py",
        "            child.match = child.match or child.fallback.match\n",
        "",
        (f"{_TEXT}/test_text_stop.py::test_a_stop_inside_a_longer_one_ends_first",),
    ),
    Mutant(
        "character-split",
        "a character of several tokens comes whole",
        "engine/text/detokenizer.py",
        'return self._decoder.decode(self._token_bytes.get(token_id, b""))',
        'return self._token_bytes.get(token_id, b"").decode(errors="replace")',
        (f"{_TEXT}/test_text_detokenizer.py::test_byte_level_holds_back_three_bytes_at_most",),
    ),
    Mutant(
        "text-decoded-by-itself",
        "a text is what its tokenizer says behind the prompt",
        "engine/text/reply.py",
        "prompt=None if request.begins_turn else request.prompt_token_ids",
        "prompt=None",
        (f"{_TEXT}/test_text_behind_prompts.py::test_a_prompt_keeps_the_space_of_the_answer_and_a_turn_does_not",),
    ),
    Mutant(
        "held-back-text-lost",
        "a text that ends without a stop string is whole",
        "engine/text/stream.py",
        "return released if stop else released + self._matcher.flush()",
        "return released",
        (f"{_TEXT}/test_text_stream.py::test_a_text_that_ends_within_a_stop_string_is_whole",),
    ),
)
