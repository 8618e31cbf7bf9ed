"""Routes of the Responses API."""

from __future__ import annotations

from starlette.routing import Route

from penstock.gateway.responses.create import create_response
from penstock.gateway.responses.retrieve import cancel_response, delete_response, list_input_items, retrieve_response

ROUTES = [
    Route("/v1/responses", create_response, methods=["POST"]),
    Route("/v1/responses/{response_id}", retrieve_response, methods=["GET"]),
    Route("/v1/responses/{response_id}", delete_response, methods=["DELETE"]),
    Route("/v1/responses/{response_id}/cancel", cancel_response, methods=["POST"]),
    Route("/v1/responses/{response_id}/input_items", list_input_items, methods=["GET"]),
]
