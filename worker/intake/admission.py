"""Turns wire requests into engine requests, with the worker's limits and the model's defaults."""

from __future__ import annotations

from dataclasses import replace

from penstock.engine.errors import InvalidRequest
from penstock.engine.generation_defaults import GenerationDefaults
from penstock.engine.request import Request
from penstock.parameters import SamplingParameters, declared
from penstock.protocol.wire import GenerateRequest
from penstock.worker.config import WorkerConfig
from penstock.worker.intake.preparation import Preparation


def check_limits(request: GenerateRequest, config: WorkerConfig) -> None:
    """Refuses a request that is over this worker's limits, before any work is done for it.

    Raises:
        InvalidRequest: the message names the limit.
    """
    _limit(request.n, "n", config.max_n, "max_n")
    _limit(len(request.stop), "the number of stop strings", config.max_stop_strings, "max_stop_strings")
    for stop in request.stop:
        _limit(len(stop), "the length of a stop string", config.max_stop_chars, "max_stop_chars")
    _limit(request.keep_s or 0.0, "keep_s", config.max_keep_s, "max_keep_s")


def to_engine_request(
    request: GenerateRequest,
    preparation: Preparation,
    defaults: GenerationDefaults,
    generated: tuple[tuple[int, ...], ...] = (),
) -> Request:
    """Makes the engine's request. A field that the client left open takes the model's default.

    A missing seed stays missing: the engine derives it from the request id, so a worker that resumes the request draws
    the same.

    Raises:
        InvalidRequest: a value is out of range.
    """
    given = {name: getattr(request, name) for name in declared(SamplingParameters)}
    sampling = replace(defaults.sampling, **{name: value for name, value in given.items() if value is not None})
    if request.id is None:
        raise InvalidRequest("the request has no id")
    return Request(
        id=request.id,
        prompt_token_ids=preparation.prompt_token_ids,
        sampling=sampling,
        n=request.n,
        priority=request.priority,
        generated=generated,
        response=preparation.response,
        begins_turn=request.messages is not None and not request.continue_final_message,
        echo=preparation.echo,
        grammar=preparation.grammar,
        cache_salt=request.cache_salt or "",
    )


def _limit(value: float, what: str, limit: float, name: str) -> None:
    if value > limit:
        raise InvalidRequest(f"{what} is {value:.15g}, the limit {name} is {limit:.15g}")
