"""Options of `penstock gateway`. Its work is in `penstock.gateway.serve`, which needs the gateway extra."""

from __future__ import annotations

import typer

from penstock.cli.shared.errors import require_gateway_extra
from penstock.cli.shared.options import takes_settings
from penstock.cli.shared.programs import GATEWAY
from penstock.gateway.settings import GatewaySettings
from penstock.protocol.errors import PenstockError
from penstock.serving.log_lines import Rank
from penstock.worker.logs import service_logs


@takes_settings(GatewaySettings.model_fields, GATEWAY)
def gateway(*, settings: GatewaySettings) -> None:
    """Serve the HTTP APIs of OpenAI and Anthropic in front of the queues, for any of their clients.

    SIGTERM or SIGINT drains: the gateway takes nothing new, and open answers may go on for the drain timeout. A second
    signal, over a second later, cuts them off. SIGHUP rereads the certificate.

    Exit status: 0 drained; 1 failed; 2 wrong settings; 5 refused by Redis; 130 told to stop twice.
    """
    require_gateway_extra()
    # --help and a light install work without it
    from penstock.gateway.serve import CannotServe, serve

    with service_logs(settings.log_level, settings.log_format) as lines:
        try:
            status = serve(settings)
        except (CannotServe, PenstockError) as error:
            lines.put(f"penstock: {error}", Rank.VITAL)
            status = error.exit_status if isinstance(error, CannotServe) else 1
    if status:
        raise typer.Exit(status)
