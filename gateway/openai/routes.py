"""Routes of OpenAI's APIs, with additions such as vLLM's `/tokenize` and `/detokenize`, and `/v1/count_tokens`."""

from __future__ import annotations

from starlette.routing import Route

from penstock.gateway.openai.chat import create_chat_completion
from penstock.gateway.openai.completions import create_completion
from penstock.gateway.openai.models import list_models, retrieve_model
from penstock.gateway.openai.tokens import count_tokens, detokenize, tokenize

ROUTES = [
    Route("/v1/chat/completions", create_chat_completion, methods=["POST"]),
    Route("/v1/completions", create_completion, methods=["POST"]),
    Route("/v1/models", list_models, methods=["GET"]),
    Route("/v1/models/{model:path}", retrieve_model, methods=["GET"]),
    Route("/v1/count_tokens", count_tokens, methods=["POST"]),
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
]
