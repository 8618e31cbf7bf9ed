"""The model card of a queue: what its workers serve, for clients that have neither model nor tokenizer."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, ValidationError

from penstock.protocol.wire.values import explain


class ModelCard(BaseModel):
    """What the workers of a queue serve, and within which limits. A field that a worker does not know is None.

    Digests are the first 32 hex digits of SHA-256; `arithmetic` has 16. Equal digests mean equal content, except that
    of the weights, which covers samples of their files: an edit that leaves all sampled bytes unchanged goes unnoticed.
    """

    model_config = ConfigDict(extra="ignore", frozen=True, protected_namespaces=())

    model: str  # its first name: the first of `served_model_name`, or else the setting `model`
    aliases: str | None = None  # its other names, with spaces between
    worker: str  # the worker that wrote the card
    version: str  # of Penstock
    revision: str | None = None  # of a model from the hub
    weights: str | None = None  # digest
    tokenizer: str | None = None  # digest of it as loaded
    template: str | None = None  # digest of the chat template; None: the model takes no messages
    template_limits: str | None = None  # what the template cannot do: names, with spaces between
    template_rules: str | None = None  # version and limits by which messages are made to fit the template
    reading_rules: str | None = None  # version of the rules by which replies are read, and what is not read
    text_rules: str | None = None  # version of the rules by which tokens become text
    generation_defaults: str | None = None  # as JSON, what holds for parameters that a request leaves open
    generation_source: str | None = None  # where the checkpoint states them, and which; None: nowhere
    logprobs_mode: str | None = None  # which distribution log-probabilities are of: `adjusted` or `raw_logprobs`
    chat_format: str | None = None  # how replies to messages are read; None: as plain text
    digest: str | None = None  # of all that decides on tokens and their text; `own` entries name it
    vocab_size: int | None = None  # token ids are below it
    max_model_len: int | None = None  # prompt and generated tokens of one sequence
    dtype: str | None = None
    attention: str | None = None  # which kernels compute it, such as `native`, `xla` or `triton`
    matmul: str | None = None
    arithmetic: str | None = None  # names how the worker rounds; `own` entries name it
    batch_invariant: bool | None = None  # log-probabilities are the same to the bit in any batch
    max_body_bytes: int | None = None  # the limits of the worker's settings
    max_prompt_tokens: int | None = None
    max_n: int | None = None
    max_stop_strings: int | None = None
    max_stop_chars: int | None = None
    max_keep_s: float | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The names that requests may give the model."""
        return (self.model, *(self.aliases or "").split())

    @property
    def shows_tools(self) -> bool:
        """Whether tools reach the model's prompt and its calls are read, as far as the card says."""
        return {"tools", "unread_calls"}.isdisjoint((self.template_limits or "").split())

    def to_fields(self) -> dict[str, str]:
        """Returns the fields of the hash, without those that are None."""
        return {name: str(value) for name, value in self.model_dump().items() if value is not None}


def decode_card(fields: Mapping[bytes, bytes]) -> ModelCard:
    """Reads a card. Fields that a later version has are ignored.

    Raises:
        ValueError: it is not a card.
    """
    try:
        return ModelCard.model_validate({name.decode(): value.decode() for name, value in fields.items()})
    except ValidationError as error:
        raise ValueError(f"the model card's key holds no valid card: {explain(error)}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"the model card's key holds no valid card: {error}") from None
