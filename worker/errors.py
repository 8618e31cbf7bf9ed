"""Errors that end a worker, or keep it from starting.

WorkerError            base; `exit_status` is that of `penstock worker`
├── BadWorkerConfig    (also ValueError)  2  a value in WorkerConfig that cannot be used
├── NameTaken                             3  another live process of the queue uses this worker's name
├── EngineFailed                          4  the model could not be loaded, or the engine's thread ended with an error
├── RedisRefused                          5  Redis answers, but refuses what a worker must do (no permission)
├── DrainIncomplete                       6  the grace period ended and requests could not be handed back
├── TaskFailed                            7  a part of the service ended with an unexpected error
├── OtherFleet                            8  the queue's workers have another model, tokenizer or chat template
└── Aborted                             130  told to stop twice

After a drain `WorkerService.run` returns, and the exit status is 0. Whatever the status, no request is lost: what was
not finished or handed back is taken over by other workers once this one's heartbeat is gone.
"""

from __future__ import annotations

from typing import ClassVar

_CARD_WORDS = {
    "weights": "the weights",
    "tokenizer": "the tokenizer",
    "template": "the chat template",
    "chat_format": "the chat format",
    "vocab_size": "a vocabulary of size",
    "reading_rules": "the rules of reading",
    "text_rules": "the rules of text",
    "generation_defaults": "the generation defaults",
    "logprobs_mode": "the logprobs_mode",
}


class WorkerError(Exception):
    """Base of all errors of this package."""

    exit_status: ClassVar[int] = 1


class BadWorkerConfig(WorkerError, ValueError):
    """A setting that cannot be used. The message names it and its value; `settings` has the name."""

    exit_status = 2

    def __init__(self, message: str, *settings: str) -> None:
        super().__init__(message)
        self.settings = settings


class NameTaken(WorkerError):
    """Another live process has the name: this one does not start, or it drains and ends.

    The two would take each other's requests, as pending entries are listed by name.
    """

    exit_status = 3

    def __init__(self, name: str, queue: str) -> None:
        super().__init__(
            f"another process uses the name {name!r} in queue {queue!r}; each worker needs a name of its own"
        )


class EngineFailed(WorkerError):
    """The engine never started or has ended. Its cause is chained."""

    exit_status = 4


class RedisRefused(WorkerError):
    """Redis refused a command for good. Its cause is chained."""

    exit_status = 5


class DrainIncomplete(WorkerError):
    """Requests were left to be recovered by others, because Redis could not be told in time."""

    exit_status = 6


class TaskFailed(WorkerError):
    """A task of the service ended, though it should run as long as the service does. Its cause is chained."""

    exit_status = 7


class OtherFleet(WorkerError):
    """The workers of the queue have another model, or turn text into other tokens: this one does not join them.

    A reply that is taken over goes on from its token ids, so it must be the same model that goes on.
    """

    exit_status = 8

    def __init__(self, queue: str, by: str, field: str, theirs: str, own: str) -> None:
        super().__init__(
            f"the workers of queue {queue!r} have {_CARD_WORDS.get(field, field)} {theirs or '(none)'} (so says {by}), "
            f"this one has {own or '(none)'}; serve another queue, drain those first, or set allow_other_fleet"
        )


class Aborted(WorkerError):
    """A second request to stop came before the drain was done."""

    exit_status = 130
