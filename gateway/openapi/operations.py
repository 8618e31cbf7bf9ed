"""What each route does, and the body that it reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from pydantic import BaseModel

from penstock.gateway.anthropic.request import COUNT_POLICY, MESSAGE_POLICY, MessageBody, MessagesPrompt
from penstock.gateway.batches.request import BATCH_POLICY, BatchBody
from penstock.gateway.common.fields import Policy
from penstock.gateway.openai.chat_request import CHAT_POLICY, ChatBody
from penstock.gateway.openai.completion_request import COMPLETION_POLICY, CompletionBody
from penstock.gateway.openai.tokens import PROMPT_POLICY, TOKENS_POLICY, TokenizeBody, TokensBody
from penstock.gateway.operations.routes import CancelBody, DrainBody, ReplayBody
from penstock.gateway.responses.request import RESPONSE_POLICY, ResponseBody


class Operation(NamedTuple):
    """A route with one method."""

    says: str
    body: type[BaseModel] | None = None
    policy: Policy | None = None  # of the body; None: it has all fields of `body`
    is_streamed: bool = False  # if the body says so, the answer is a stream of events
    is_form: bool = False  # the body is `multipart/form-data`
    query: tuple[str, ...] = ()


_PAGE = ("after", "limit", "order")

OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("POST", "/v1/chat/completions"): Operation("Answer a chat.", ChatBody, CHAT_POLICY, is_streamed=True),
    ("POST", "/v1/completions"): Operation("Continue a text.", CompletionBody, COMPLETION_POLICY, is_streamed=True),
    ("POST", "/v1/responses"): Operation("Make a response.", ResponseBody, RESPONSE_POLICY, is_streamed=True),
    ("GET", "/v1/responses/{response_id}"): Operation(
        "Get a response, or its events.", query=("stream", "starting_after")
    ),
    ("DELETE", "/v1/responses/{response_id}"): Operation("End and forget a response."),
    ("POST", "/v1/responses/{response_id}/cancel"): Operation("End a response."),
    ("GET", "/v1/responses/{response_id}/input_items"): Operation("List the input of a response.", query=_PAGE),
    ("POST", "/v1/messages"): Operation("Answer messages.", MessageBody, MESSAGE_POLICY, is_streamed=True),
    ("POST", "/v1/messages/count_tokens"): Operation("Count the tokens of messages.", MessagesPrompt, COUNT_POLICY),
    ("GET", "/v1/models"): Operation("List what is served."),
    ("GET", "/v1/models/{model}"): Operation("Get a model by one of its names."),
    ("POST", "/v1/count_tokens"): Operation("Count the tokens of a prompt.", TokenizeBody, PROMPT_POLICY),
    ("POST", "/tokenize"): Operation("Get the tokens of a prompt.", TokenizeBody, PROMPT_POLICY),
    ("POST", "/detokenize"): Operation("Get the text of tokens.", TokensBody, TOKENS_POLICY),
    ("POST", "/v1/files"): Operation("Upload a file: the parts file and purpose.", is_form=True),
    ("GET", "/v1/files"): Operation("List files.", query=(*_PAGE, "purpose")),
    ("GET", "/v1/files/{file_id}"): Operation("Get the description of a file."),
    ("DELETE", "/v1/files/{file_id}"): Operation("Delete a file."),
    ("GET", "/v1/files/{file_id}/content"): Operation("Get the content of a file."),
    ("POST", "/v1/batches"): Operation("Begin a batch.", BatchBody, BATCH_POLICY),
    ("GET", "/v1/batches"): Operation("List batches, the newest first.", query=("after", "limit")),
    ("GET", "/v1/batches/{batch_id}"): Operation("Get a batch."),
    ("POST", "/v1/batches/{batch_id}/cancel"): Operation("End a batch."),
    ("GET", "/operations/queues"): Operation("List the queues, for operators."),
    ("GET", "/operations/queues/{queue}"): Operation("See what happens in a queue."),
    ("POST", "/operations/queues/{queue}/drain"): Operation("Drain a worker.", DrainBody),
    ("POST", "/operations/queues/{queue}/cancel"): Operation("Cancel a request.", CancelBody),
    ("POST", "/operations/queues/{queue}/replay"): Operation("Replay a dead letter.", ReplayBody),
    ("GET", "/liveness"): Operation("Whether the process lives."),
    ("GET", "/readiness"): Operation("Whether the process takes requests."),
    ("GET", "/health"): Operation("The same as /readiness."),
}
"""By method and path."""
