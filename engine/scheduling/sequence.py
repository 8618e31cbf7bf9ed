"""One choice of one request, as the scheduler sees it."""

from __future__ import annotations

from hashlib import blake2b

from penstock.engine.request import Request
from penstock.engine.scheduling.amounts import NOTHING
from penstock.engine.scheduling.lookup import Lookup
from penstock.engine.scheduling.page_pool import page_hash, root_hash
from penstock.engine.scheduling.page_table import PageTable
from penstock.engine.scheduling.state_table import StateTable


class Sequence:
    """A growing list of tokens, of which the first `num_computed` have their keys and values in `pages`, and the state
    behind them in `states`, where the model has such.

    `num_computed` counts what was dispatched; the device runs steps in order, so for every later step it is done.
    `num_in_flight` counts sampled tokens that the device knows, or will know, and the host does not yet.
    """

    __slots__ = (
        "arrival",
        "batch_slot",
        "index",
        "is_finished",
        "is_suspect",
        "lookup",
        "max_tokens",
        "num_accepted",
        "num_cached",
        "num_computed",
        "num_drafted",
        "num_in_flight",
        "num_indexed",
        "num_passed_pages",
        "num_prompt",
        "num_scored",
        "num_starts",
        "page_hashes",
        "pages",
        "rank",
        "request",
        "rope_length",
        "sampling_words",
        "scores_prompt",
        "seed",
        "states",
        "token_ids",
    )

    def __init__(self, request: Request, index: int, arrival: int) -> None:
        self.request = request
        self.index = index
        self.arrival = arrival
        self.rank = (
            -request.priority,
            arrival,
            index,
        )  # who runs first, and from the other end, who is preempted first
        generated = request.generated[index] if request.generated else ()
        self.token_ids: list[int] = [*request.prompt_token_ids, *generated]
        self.num_prompt = len(request.prompt_token_ids)
        self.max_tokens = self.num_prompt + request.sampling.max_tokens  # it may get: of prompt and output together
        self.scores_prompt = _scores_prompt(request, index)
        # Behind so many tokens the log-probability of the next one is known, or not wanted.
        self.num_scored = 0 if self.scores_prompt else self.num_prompt - 1
        self.num_computed = 0
        self.num_in_flight = 0
        self.num_cached = 0  # prompt tokens that the prefix cache saved when the sequence first ran
        self.num_drafted = 0  # tokens that were guessed and then verified
        self.num_accepted = 0  # of those, how many were right
        self.rope_length = 0  # of its keys, where a rule of lengths makes frequencies depend on it; 0: none
        self.pages = PageTable()
        self.states = StateTable()
        self.num_indexed = 0  # pages, all of them full, that were made findable
        self.page_hashes: list[bytes] = []  # of its first full pages, whether it holds them or not
        self.lookup: Lookup | None = None  # the last one while it waits; None if it has to be looked up
        self.num_passed_pages = NOTHING  # that others took who started before it, though they come after it in rank
        self.batch_slot = -1  # while it runs, its place in tables that mirror running sequences; -1 while it waits
        self.num_starts = 0  # how often it was admitted: tells a batch slot's new holder from its old one
        self.seed = _seed(request, index)
        self.sampling_words: tuple[int, ...] = ()  # what is uploaded of its sampling parameters, once it was packed
        self.is_suspect = False  # was in a step that failed, and has not run since
        self.is_finished = False

    @property
    def is_constrained(self) -> bool:
        """Whether a grammar says what it may continue with: it samples one token a step, after the one before."""
        return self.request.grammar is not None

    @property
    def num_tokens(self) -> int:
        """Tokens that exist, those in flight included."""
        return len(self.token_ids) + self.num_in_flight

    @property
    def num_generated(self) -> int:
        """Generated tokens that exist, those in flight included: the index of the next one to sample."""
        return self.num_tokens - self.num_prompt

    @property
    def num_pending(self) -> int:
        """Tokens whose keys and values are still to be computed."""
        return self.num_tokens - self.num_computed

    @property
    def num_certain(self) -> int:
        """Of its first tokens, how many the host knows that are dispatched for certain. The newest of all is not among
        them: in a dispatch of several steps it may have ended its row, and then no step has computed it.
        """
        return min(self.num_computed, len(self.token_ids) - 1)

    @property
    def num_unscored(self) -> int:
        """Tokens of the prompt whose log-probability is still to be computed."""
        return self.num_prompt - 1 - self.num_scored

    def rotate_for(self, rope_length: int) -> None:
        """From now on its keys are computed for this length; it holds none."""
        if rope_length != self.rope_length:
            self.rope_length, self.page_hashes, self.lookup = rope_length, [], None

    def page_hash(self, number: int, page_size: int) -> bytes:
        """Of the tokens up to the end of one of its full pages."""
        for i in range(len(self.page_hashes), number + 1):
            parent = self.page_hashes[-1] if i else root_hash(self.request.cache_salt, self.rope_length)
            self.page_hashes.append(page_hash(parent, self.token_ids[i * page_size : (i + 1) * page_size]))
        return self.page_hashes[number]


class SequenceFailed(Exception):
    """Planning failed at one sequence. All others are as they were: without it, the plan can be made."""

    def __init__(self, sequence: Sequence) -> None:
        super().__init__(f"choice {sequence.index} of request {sequence.request.id!r}")
        self.sequence = sequence


def _scores_prompt(request: Request, index: int) -> bool:
    """The first choice alone, and with its first token: where it has that from an earlier run, they are out."""
    is_new = not (request.generated and request.generated[index])
    return index == 0 and is_new and request.sampling.prompt_logprobs is not None


def _seed(request: Request, index: int) -> int:
    """64 bits that, with the output index, decide what is sampled.

    Without a seed the request's id decides, so that every worker that resumes it draws the same tokens.
    """
    source = request.id if request.sampling.seed is None else str(request.sampling.seed)
    return int.from_bytes(blake2b(f"{source}/{index}".encode(), digest_size=8).digest(), "little")
