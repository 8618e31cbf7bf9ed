"""One choice of one request, as the scheduler sees it."""

from __future__ import annotations

from hashlib import blake2b

from penstock.engine.request import Request
from penstock.engine.scheduling.memory.amounts import NOTHING
from penstock.engine.scheduling.memory.lookup import Lookup
from penstock.engine.scheduling.memory.page_pool import page_hash, root_hash
from penstock.engine.scheduling.memory.page_table import PageTable
from penstock.engine.scheduling.memory.state_table import StateTable


class Sequence:
    """A growing list of tokens; `pages` hold the keys and values of the first `num_computed`.

    If the model keeps states, `states` has the state after those tokens.

    `num_computed` counts what was dispatched: the device runs steps in order, so for every later step it is done.
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
        )  # lowest runs first, highest is preempted first
        generated = request.generated[index] if request.generated else ()
        self.token_ids: list[int] = [*request.prompt_token_ids, *generated]
        self.num_prompt = len(request.prompt_token_ids)
        self.max_tokens = self.num_prompt + request.sampling.max_tokens  # limit of prompt and output together
        self.scores_prompt = _scores_prompt(request, index)
        # Number of tokens after which the next one's log-probability is known or not wanted.
        self.num_scored = 0 if self.scores_prompt else self.num_prompt - 1
        self.num_computed = 0
        self.num_in_flight = 0
        self.num_cached = 0  # prompt tokens that the prefix cache saved when the sequence first ran
        self.num_drafted = 0  # drafted tokens that were verified
        self.num_accepted = 0  # drafted tokens that were right
        self.rope_length = 0  # of its keys, if a length rule makes frequencies depend on it; 0: none
        self.pages = PageTable()
        self.states = StateTable()
        self.num_indexed = 0  # full pages that were indexed
        self.page_hashes: list[bytes] = []  # of its first full pages, whether it holds them or not
        self.lookup: Lookup | None = None  # the last one while it waits; None: look up again
        self.num_passed_pages = NOTHING  # pages taken by sequences that started first despite their lower rank
        self.batch_slot = -1  # while it runs, its index in tables that mirror running sequences; -1 while it waits
        self.num_starts = 0  # how often it was admitted; distinguishes a batch slot's holders
        self.seed = _seed(request, index)
        self.sampling_words: tuple[int, ...] = ()  # its packed sampling parameters, once computed
        self.is_suspect = False  # was in a step that failed, and has not run since
        self.is_finished = False

    @property
    def is_constrained(self) -> bool:
        """Whether a grammar constrains it: then it samples one token a step, each after the one before is known."""
        return self.request.grammar is not None

    @property
    def num_tokens(self) -> int:
        """Number of existing tokens, those in flight included."""
        return len(self.token_ids) + self.num_in_flight

    @property
    def num_generated(self) -> int:
        """Number of generated tokens, those in flight included: the index of the next one to sample."""
        return self.num_tokens - self.num_prompt

    @property
    def num_pending(self) -> int:
        """Number of tokens whose keys and values are still to be computed."""
        return self.num_tokens - self.num_computed

    @property
    def num_certain(self) -> int:
        """Number of leading tokens that the host knows and that are certainly computed.

        The newest token is not among them: in a dispatch of several steps it may have ended its row, and then no step
        has computed it.
        """
        return min(self.num_computed, len(self.token_ids) - 1)

    @property
    def num_unscored(self) -> int:
        """Number of prompt tokens whose log-probability is still to be computed."""
        return self.num_prompt - 1 - self.num_scored

    def rotate_for(self, rope_length: int) -> None:
        """Sets the length that its keys are computed for from now on; it must hold no keys."""
        if rope_length != self.rope_length:
            self.rope_length, self.page_hashes, self.lookup = rope_length, [], None

    def page_hash(self, number: int, page_size: int) -> bytes:
        """Returns the hash of the tokens up to the end of one of its full pages."""
        for i in range(len(self.page_hashes), number + 1):
            parent = self.page_hashes[-1] if i else root_hash(self.request.cache_salt, self.rope_length)
            self.page_hashes.append(page_hash(parent, self.token_ids[i * page_size : (i + 1) * page_size]))
        return self.page_hashes[number]


class SequenceFailed(Exception):
    """Planning failed for one sequence. All others are unchanged: without it, planning can succeed."""

    def __init__(self, sequence: Sequence) -> None:
        super().__init__(f"choice {sequence.index} of request {sequence.request.id!r}")
        self.sequence = sequence


def _scores_prompt(request: Request, index: int) -> bool:
    """Whether a choice scores the prompt: only the first does, unless an earlier run has sent the log-probabilities."""
    is_new = not (request.generated and request.generated[index])
    return index == 0 and is_new and request.sampling.prompt_logprobs is not None


def _seed(request: Request, index: int) -> int:
    """Returns 64 bits that, with the output index, determine what is sampled.

    Without a seed the request's id determines them, so that every worker that resumes it draws the same tokens.
    """
    source = request.id if request.sampling.seed is None else str(request.sampling.seed)
    return int.from_bytes(blake2b(f"{source}/{index}".encode(), digest_size=8).digest(), "little")
