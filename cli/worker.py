"""Options of `penstock worker`. Its work is in `penstock.cli.shared.serve`, which needs the worker extra."""

from __future__ import annotations

from penstock.cli.shared.errors import require_worker_extra
from penstock.cli.shared.options import takes_settings
from penstock.local.progress import spinner
from penstock.serving import garbage
from penstock.worker.settings import Settings


@takes_settings(Settings.model_fields)
def worker(*, settings: Settings) -> None:
    """Serve a model: load it, warm it up, then answer requests from the queue until told to stop.

    SIGTERM or SIGINT drains: the worker takes nothing new, running requests may finish within the drain timeout, and
    other workers continue the rest. A second signal, over a second later, aborts.

    Exit status: 0 drained; 1 failed; 2 wrong settings; 3 the name is taken; 4 the engine failed; 5 Redis refused;
    6 not everything could be handed back; 7 a part of the service failed; 8 the queue's workers
    have another tokenizer, chat template or vocabulary; 130 aborted.
    """
    require_worker_extra()
    with spinner("starting"), garbage.paused():
        from penstock.cli.shared.serve import serve  # loads jax, which --help and a light install lack

    serve(settings)
