"""The loads that engines are compared on, by name."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from penstock.tools.bench.options import LoadOptions
from penstock.tools.bench.traffic.arrivals import Arrivals


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests, and the engine setup that they need."""

    load: LoadOptions
    max_model_len: int = 1024
    prefix_caching: bool = False
    share: float | None = None  # of the requests per second that an engine can serve; None: all come at once

    def requests(self, vocab_size: int, rate: float | None, turn: int) -> list[dict[str, Any]]:
        """Draws requests in the form of `protocol.Wanted`. Each `turn` has other token ids, so no cache knows its
        prompts.
        """
        load = self.load.load(vocab_size, turn)
        arrivals = Arrivals() if rate is None else Arrivals("poisson", rate)
        times_s = arrivals.times_s(len(load.requests), load.seed)
        prompts = [request.prompt for request in load.requests if isinstance(request.prompt, tuple)]
        return [
            {"prompt": list(prompt), "num_tokens": request.max_tokens, "time_s": time_s}
            for prompt, request, time_s in zip(prompts, load.requests, times_s, strict=True)
        ]

    def with_options(self, requests: int | None, seed: int) -> Workload:
        load = dataclasses.replace(self.load, requests=requests or self.load.requests, seed=seed)
        return dataclasses.replace(self, load=load)


def _streams(count: int, prompt: int, output: int) -> LoadOptions:
    return LoadOptions(requests=count, prompt_length=str(prompt), output_length=str(output))


WORKLOADS = {
    "shared": Workload(LoadOptions(requests=64)),
    "log-normal": Workload(
        LoadOptions(requests=96, prompt_length="lognormal:180:8:1200", output_length="lognormal:60:4:300"), 1536
    ),
    "prefixes": Workload(
        LoadOptions(
            dataset="shared-prefix", requests=64, prefix_length=700, prefix_count=8, prompt_length="loguniform:16:128"
        ),
        prefix_caching=True,
    ),
    "16-streams": Workload(_streams(16, 32, 400)),
    "4-streams": Workload(_streams(4, 32, 400)),
    "1-stream": Workload(_streams(1, 32, 400)),
    "4k": Workload(_streams(6, 4000, 96), 4096),
    "first-4k": Workload(_streams(1, 4000, 2), 4096),
    "first-16k": Workload(_streams(1, 16000, 2), 16384),
    "online-40": Workload(LoadOptions(requests=128), share=0.4),
    "online-80": Workload(LoadOptions(requests=128), share=0.8),
}
