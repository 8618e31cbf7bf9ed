"""Exits with 0 once the gateway in this container is ready.

It asks at the metrics port, which clients cannot fill; without one, at the clients' port, with TLS if the gateway has a
certificate.
"""

import os
import ssl
import urllib.request
from pathlib import Path

AUTHORITY = Path("/run/penstock/ca.crt")
metrics_port = os.environ.get("PENSTOCK_GATEWAY_METRICS_PORT", "none")
context = ssl.create_default_context(cafile=AUTHORITY) if AUTHORITY.exists() else None
url = f"{'http' if context is None else 'https'}://localhost:8000/readiness"
if metrics_port.strip("0").isdecimal():
    url = f"http://localhost:{metrics_port}/readiness"
urllib.request.urlopen(url, timeout=4, context=context).close()  # noqa: S310  this host only
