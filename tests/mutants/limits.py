"""Slips in what a gateway's keys may do."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_KEYS = "tests/gateway/keys"
_TABS = f"{_KEYS}/test_key_tabs.py"
_LIMITS = f"{_KEYS}/test_key_limits.py"

LIMITS = (
    Mutant(
        "reservation-not-given-back",
        "a key pays for what its requests used, not for what they might have used",
        "gateway/keys/lua/settle.lua",
        "  redis.call('HINCRBY', KEYS[1], second, total - tokens)\n",
        "",
        (f"{_LIMITS}::test_tokens_per_minute",),
    ),
    Mutant(
        "excess-not-charged",
        "tokens beyond the reservation count",
        "gateway/keys/lua/settle.lua",
        "  count_in(KEYS[1], now, total - tokens)\n",
        "",
        (f"{_TABS}::test_tokens_beyond_the_reservation_count_when_they_are_known",),
    ),
    Mutant(
        "leases-dropped-early",
        "a request counts as running until its lease lapses",
        "gateway/keys/lua/admit.lua",
        "redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now - ARGV[5])",
        "redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now + ARGV[5])",
        (f"{_LIMITS}::test_of_many_that_come_at_once_to_all_gateways_so_many_are_let_in",),
    ),
    Mutant(
        "n-counts-once",
        "each of n choices is a concurrent request",
        "gateway/admission/admission.py",
        "Order(tab, request.n if sent.is_at_once else 0,",
        "Order(tab, 1 if sent.is_at_once else 0,",
        (f"{_KEYS}/test_charged_as_published.py::test_what_can_be_computed_is_reserved",),
    ),
    Mutant(
        "minute-of-the-clock",
        "no 60 s in a row exceed a limit",
        "gateway/keys/lua/window.lua",
        "    if (second + 61) * 1000 <= now_ms then\n",
        "    if math.floor(second / 60) < math.floor(now_ms / 60000) then\n",
        (f"{_LIMITS}::test_a_minute_of_the_clock_does_not_begin_anew",),
    ),
    Mutant(
        "repetition-pays-again",
        "all who repeat a request pay for it once",
        "gateway/keys/lua/reserve.lua",
        "redis.call('HEXISTS', KEYS[4], ARGV[at]) == 1 or redis.call('ZSCORE', KEYS[2], 'paid:' .. id)",
        "redis.call('HEXISTS', KEYS[4], ARGV[at]) == 1",
        (f"{_TABS}::test_who_asks_again_pays_once",),
    ),
    Mutant(
        "any-model",
        "a key is for its models",
        "gateway/directory.py",
        "for queue, card in cards.items() if self._allowed & {queue, *card.names}}",
        "for queue, card in cards.items()}",
        (f"{_KEYS}/test_gateway_keys.py::test_a_key_is_for_its_models",),
    ),
    Mutant(
        "idempotency-key-for-any-body",
        "an idempotency key belongs to one request",
        "gateway/generation/lua/remember.lua",
        "ARGV[1], 'NX')",
        "ARGV[1])",
        ("tests/gateway/test_idempotency.py::test_a_key_belongs_to_one_request",),
    ),
    Mutant(
        "idempotency-key-of-all-callers",
        "two API keys have their own idempotency keys",
        "gateway/admission/request_ids.py",
        'hashed_id("k", key_id, asked.url.path,',
        'hashed_id("k", asked.url.path,',
        (f"{_KEYS}/test_gateway_keys.py::test_two_keys_have_their_own_idempotency_keys",),
    ),
    Mutant(
        "no-retry-after",
        "who is refused for a while is told when to come again",
        "gateway/errors.py",
        'return {"retry-after": str(self.retry_after_s), "x-should-retry": "true"}',
        'return {"x-should-retry": "true"}',
        ("tests/gateway/openai/test_openai_errors.py::test_a_full_queue_says_when_to_come_again",),
    ),
)
