"""Routes of the Files API."""

from __future__ import annotations

from starlette.routing import Route

from penstock.gateway.files.handlers import create_file, delete_file, list_files, read_content, retrieve_file

ROUTES = [
    Route("/v1/files", create_file, methods=["POST"]),
    Route("/v1/files", list_files, methods=["GET"]),
    Route("/v1/files/{file_id}", retrieve_file, methods=["GET"]),
    Route("/v1/files/{file_id}", delete_file, methods=["DELETE"]),
    Route("/v1/files/{file_id}/content", read_content, methods=["GET"]),
]
