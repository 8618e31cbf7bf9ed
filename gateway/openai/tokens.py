"""Questions about prompts that a worker answers: `/v1/count_tokens`, and vLLM's `/tokenize` and `/detokenize`."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from penstock.gateway.common.documents import spell
from penstock.gateway.common.fields import Body, Policy, Refusal, read_fields
from penstock.gateway.common.options import TokenIds, to_request
from penstock.gateway.context import gateway_of
from penstock.gateway.errors import ApiError
from penstock.gateway.http.body import read_json
from penstock.gateway.http.disconnect import while_asked
from penstock.gateway.openai.messages import clean
from penstock.producer import AsyncClient, GenerateRequest
from penstock.protocol.wire import spell_tokens


class TokenizeBody(Body):
    """A prompt or a chat. `conversation` holds either."""

    model: Annotated[str, Field(min_length=1)]
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    conversation: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def request(self) -> GenerateRequest:
        """The request. Raises ApiError naming what is wrong."""
        values = {name: getattr(self, name) for name in self.model_fields_set - {"model", "conversation"}}
        if self.conversation is not None:
            name = "prompt" if isinstance(self.conversation, str) else "messages"
            if name in values:
                raise ApiError(400, f"conversation and {name} are the same; give one", param="conversation")
            values[name] = self.conversation
        if "messages" in values:
            values["messages"] = clean(values["messages"])
        return to_request(values)


class TokensBody(Body):
    """Tokens to convert to text."""

    model: Annotated[str, Field(min_length=1)]
    tokens: TokenIds


PROMPT_POLICY = Policy(
    honoured=frozenset(TokenizeBody.model_fields),
    ignored={"user": "whom a request is for comes from its API key"},
    refused={
        "return_token_strs": Refusal("send the tokens to /detokenize", (False,)),
        "add_special_tokens": Refusal("they are counted as the model gets them", (True,)),
        "chat_template": Refusal("the template is the model's own"),
        "mm_processor_kwargs": Refusal("prompts are text"),
    },
)
TOKENS_POLICY = Policy(frozenset(TokensBody.model_fields), {}, {})


async def count_tokens(asked: Request) -> Response:
    body = await _prompt_body(asked)
    queue = await gateway_of(asked).directory.queue_of(body.model)
    client = gateway_of(asked).client.on(queue)
    return JSONResponse({"model": body.model, "count": await while_asked(asked, client.count_tokens(body.request))})


async def tokenize(asked: Request) -> Response:
    body = await _prompt_body(asked)
    queue = await gateway_of(asked).directory.queue_of(body.model)
    tokens = await prompt_tokens(asked, queue, body.request)
    card = await gateway_of(asked).directory.card_of(queue)
    counted = spell({"count": len(tokens), "max_model_len": card.max_model_len, "tokens": [], "token_strs": None})
    # Encoding a long list at once would hold up streams.
    listed = await asyncio.to_thread(spell_tokens, tokens)
    document = counted.replace('"tokens":[]', f'"tokens":[{listed}]')
    return Response(document, media_type="application/json")


async def detokenize(asked: Request) -> Response:
    body = read_fields(TOKENS_POLICY, TokensBody, await _json(asked))
    queue = await gateway_of(asked).directory.queue_of(body.model)
    client = gateway_of(asked).client.on(queue)
    text = await while_asked(asked, client.detokenize(body.tokens, skip_special_tokens=False))
    return JSONResponse({"prompt": text})


async def prompt_tokens(asked: Request, queue: str, request: GenerateRequest) -> tuple[int, ...]:
    """Returns the tokens of a request's prompt."""
    return await while_asked(asked, tokens_of(gateway_of(asked).client.on(queue), request))


async def tokens_of(client: AsyncClient, request: GenerateRequest) -> tuple[int, ...]:
    """Returns the tokens of a request's prompt; `client` is of its queue."""
    return request.prompt_token_ids if request.prompt_token_ids is not None else await client.tokenize(request)


async def prompt_of(client: AsyncClient, request: GenerateRequest) -> str:
    """Returns the text of a request's prompt, which is not a chat; `client` is of its queue."""
    if request.prompt_token_ids is None:
        return request.prompt or ""
    return await client.detokenize(request.prompt_token_ids)


async def _json(asked: Request) -> dict[str, Any]:
    return await read_json(asked, gateway_of(asked).settings.max_body_bytes)


async def _prompt_body(asked: Request) -> TokenizeBody:
    return read_fields(PROMPT_POLICY, TokenizeBody, await _json(asked))
