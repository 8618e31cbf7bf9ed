"""Slips in the scheduler and the paged KV cache."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_CODE = "engine/scheduling"
_TESTS = "tests/engine/scheduling"
_SCHEDULER = f"{_TESTS}/test_scheduler.py"
_POOL = f"{_TESTS}/test_page_pool.py"
_DRAFTS = f"{_TESTS}/test_scheduler_drafts.py"

SCHEDULING = (
    Mutant(
        "window-released-early",
        "a page stays held while a token still to be computed sees it",
        f"{_CODE}/memory/page_needs.py",
        "max(0, position - window + 1) // self.page_size",
        "max(0, position - window + 2) // self.page_size",
        (f"{_POOL}::test_a_window_of_one_needs_no_page_and_one_of_a_page_and_two_needs_two",),
    ),
    Mutant(
        "whole-prompt-from-the-cache",
        "the last token of a prompt is computed, and shared pages are never written",
        f"{_CODE}/sequence_pages.py",
        "if sequence.num_unscored else len(sequence.token_ids) - 1",
        "if sequence.num_unscored else len(sequence.token_ids)",
        (f"{_SCHEDULER}::test_a_prefix_is_taken_from_the_cache_and_the_last_token_still_computed",),
    ),
    Mutant(
        "page-shared-before-it-is-computed",
        "only pages that are certainly computed are shared",
        f"{_CODE}/sequence.py",
        "return min(self.num_computed, len(self.token_ids) - 1)",
        "return min(self.num_computed, len(self.token_ids))",
        (f"{_TESTS}/test_sequence.py::test_the_newest_token_is_not_certain_to_be_computed",),
    ),
    Mutant(
        "draft-counted-after-preemption",
        "a preempted sequence computes its accepted drafts again",
        f"{_CODE}/scheduler.py",
        "            elif sequence.batch_slot >= 0:",
        "            elif True:",
        (f"{_DRAFTS}::test_a_sequence_preempted_in_flight_keeps_its_right_drafts_and_computes_them_again",),
    ),
    Mutant(
        "page-shared-and-evictable",
        "a page that somebody holds is not handed out",
        f"{_CODE}/memory/page_store.py",
        "                del self.cached[page]\n",
        "",
        (f"{_POOL}::test_a_released_prefix_is_found_again_and_shared",),
    ),
    Mutant(
        "beginnings-evicted-first",
        "a prefix outlives its tail in the cache",
        f"{_CODE}/memory/page_store.py",
        "for page in reversed(pages):",
        "for page in pages:",
        (f"{_POOL}::test_eviction_takes_the_least_recently_used_and_tails_before_heads",),
    ),
    Mutant(
        "salt-not-hashed",
        "requests with different cache salts share no page",
        f"{_CODE}/sequence.py",
        "root_hash(self.request.cache_salt, self.rope_length)",
        'root_hash("", self.rope_length)',
        (f"{_TESTS}/test_sequence.py::test_only_pages_of_one_salt_and_one_rotary_length_are_alike",),
    ),
    Mutant(
        "cache-kept-after-a-failed-step",
        "pages of a failed step serve nobody",
        f"{_CODE}/scheduler.py",
        "        self._pool.forget_contents()\n",
        "",
        (f"{_SCHEDULER}::test_the_sequence_that_fails_alone_is_given_up_and_its_neighbours_finish",),
    ),
    Mutant(
        "state-outlives-its-page",
        "a kept state goes with its page",
        f"{_CODE}/memory/page_pool.py",
        "            self.states.forget(digest)  # a prefix that ends there can't be reused any more\n",
        "",
        (f"{_TESTS}/test_scheduler_states.py::test_a_state_goes_with_its_page",),
    ),
    Mutant(
        "started-prompt-costs-no-budget",
        "a step computes no more tokens than its budget",
        f"{_CODE}/scheduler.py",
        "                chosen[sequence] = count\n                budget -= count\n",
        "                chosen[sequence] = count\n",
        (f"{_TESTS}/test_scheduler_sharing.py::test_a_short_prompt_is_computed_in_the_step_after_it_came",),
    ),
    Mutant(
        "one-row-too-many",
        "a prompt that is scored takes no more rows than are free",
        f"{_CODE}/scheduler.py",
        "count = min(count, prompts.num_free_rows + 1)",
        "count = min(count, prompts.num_free_rows + 2)",
        (f"{_SCHEDULER}::test_a_prompt_that_is_scored_takes_a_row_for_each_token_of_those_that_are_free",),
    ),
    Mutant(
        "passed-for-good",
        "what passes a waiting prompt takes no more pages than that needs",
        f"{_CODE}/admission.py",
        "            passed.num_passed_pages += num_pages\n",
        "            passed.num_passed_pages = num_pages\n",
        (f"{_TESTS}/test_scheduler_admission.py",),
    ),
    Mutant(
        "long-prompt-starves",
        "short prompts leave the first one half of each step",
        f"{_CODE}/sharing.py",
        "budget if is_higher else budget - floor)",
        "budget)",
        (f"{_TESTS}/test_scheduler_sharing.py",),
    ),
    Mutant(
        "token-after-the-last",
        "no step computes a row for a token that is not wanted",
        f"{_CODE}/scheduler.py",
        "if num_pending and not (sequence.num_in_flight and num_tokens >= sequence.max_tokens):",
        "if num_pending and not (sequence.num_in_flight and num_tokens > sequence.max_tokens):",
        (f"{_SCHEDULER}::test_the_last_allowed_token_in_flight_is_not_followed_by_a_wasted_row",),
    ),
)
