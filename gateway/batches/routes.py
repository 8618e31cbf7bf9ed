"""Routes of the Batch API."""

from __future__ import annotations

from starlette.routing import Route

from penstock.gateway.batches.handlers import cancel_batch, create_batch, list_batches, retrieve_batch

ROUTES = [
    Route("/v1/batches", create_batch, methods=["POST"]),
    Route("/v1/batches", list_batches, methods=["GET"]),
    Route("/v1/batches/{batch_id}", retrieve_batch, methods=["GET"]),
    Route("/v1/batches/{batch_id}/cancel", cancel_batch, methods=["POST"]),
]
