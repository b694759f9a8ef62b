"""How a request to the control API names its prompt: by text, by token ids, or by a chat's messages."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from vllm.entrypoints.generate.base.protocol import validate_cache_salt
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.exceptions import VLLMValidationError
from vllm.renderers.online_renderer import OnlineRenderer

from app.dialects.chats import read_chat
from app.dialects.tools import read_empty
from app.gate.kv_cache_field import read_field
from app.gate.request_context import current_request
from app.openai.prompt_keys import PromptKeys
from kvmanager.segments.keys import Fidelity

LARGEST_TOKEN_ID = 999_999_999


class ChatFields(BaseModel):
    """Fields of a chat's request, other than its messages, that its template sees: as in /v1/chat/completions."""

    model_config = ConfigDict(extra="forbid")

    tools: list[Any] | None = Field(None, description="The tools that a chat's request offers.")
    tool_choice: Any = Field(None, description="What it sends as `tool_choice`.")
    documents: list[Any] | None = Field(None, description="What it sends as `documents`.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="What it sends as `chat_template_kwargs`.")
    reasoning_effort: str | None = Field(None, description="What it sends as `reasoning_effort`.")
    add_generation_prompt: bool | None = Field(None, description="What it sends as `add_generation_prompt`.")
    continue_final_message: bool | None = Field(None, description="What it sends as `continue_final_message`.")

    def given(self) -> dict[str, Any]:
        """Those that are given, by name."""
        return {name: value for name in ChatFields.model_fields if (value := getattr(self, name)) is not None}


class PromptParam(ChatFields):
    """A prompt of the tenant who asks: exactly one of `text`, `tokens` and `messages`."""

    text: str | None = Field(None, description="The prompt as text, as for /v1/completions.")
    tokens: list[Annotated[int, Field(strict=True)]] | None = Field(None, description="The prompt's token ids.")
    messages: list[Any] | None = Field(None, description="A chat's messages, as for /v1/chat/completions.")
    model: str | None = Field(None, description="What the prompt's requests send as `model`; empty: the model itself.")
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, description="What the prompt's requests send as `truncate_prompt_tokens`."
    )
    cache_salt: str | None = Field(None, description="What the prompt's requests send as `cache_salt`.")
    kv_cache: Any = Field(None, description='What they send as `kv_cache`, such as `{"fidelity": "tolerant"}`.')

    async def token_ids(self, renderer: OnlineRenderer) -> list[int]:
        """The tokens that a request with this prompt would send. Raises vLLM's client errors, which are answered 400.

        As for a completion (`text`), a chat (`messages`, with the answers in them as they were sampled), or as given
        (`tokens`).
        """
        if sum(given is not None for given in (self.text, self.tokens, self.messages)) != 1:
            raise VLLMValidationError("Give exactly one of `text`, `tokens` and `messages`.")
        of_chats = next(iter(self.given()), None)
        if of_chats is not None and self.messages is None:
            raise VLLMValidationError(f"`{of_chats}` goes with `messages` only.", parameter=of_chats)
        validate_cache_salt(self.cache_salt)
        if self.tokens is not None:
            return self._as_given(self.tokens, renderer)
        if self.messages is not None:
            return await self._render_chat(renderer)
        return await self._render_text(renderer)

    def _as_given(self, tokens: list[int], renderer: OnlineRenderer) -> list[int]:
        if self.truncate_prompt_tokens is not None:
            raise VLLMValidationError("`tokens` are taken as they are.", parameter="truncate_prompt_tokens")
        if not tokens or not all(0 <= token <= LARGEST_TOKEN_ID for token in tokens):
            raise VLLMValidationError("`tokens` must be token ids, such as 1, 17 and 2.", parameter="tokens")
        if len(tokens) > renderer.model_config.max_model_len:
            raise VLLMValidationError("`tokens` is longer than the model's context.", parameter="tokens")
        return tokens

    async def _render_text(self, renderer: OnlineRenderer) -> list[int]:
        """The tokens that /v1/completions would make of `text`."""
        text = self.text or ""
        request = CompletionRequest(prompt=text, max_tokens=1, truncate_prompt_tokens=self.truncate_prompt_tokens)
        (prompt,) = await renderer.preprocess_completion(request, text, None)
        return list(prompt["prompt_token_ids"])  # type: ignore[typeddict-item]

    async def _render_chat(self, renderer: OnlineRenderer) -> list[int]:
        """The tokens that /v1/chat/completions would make of `messages`."""
        body = {
            "messages": self.messages,
            "max_tokens": 1,
            "truncate_prompt_tokens": self.truncate_prompt_tokens,
            "cache_salt": self.cache_salt,
            "kv_cache": self.kv_cache,
            "model": self.model,
            **self.given(),
        }
        given = {name: value for name, value in body.items() if value is not None}
        read_empty(given)
        read_chat(given, drop_media=False)
        try:
            request = ChatCompletionRequest.model_validate(given)
        except ValidationError as error:
            raise RequestValidationError(error.errors()) from None
        rendered = await renderer.render_chat(request)
        if isinstance(rendered, ErrorResponse):
            raise VLLMValidationError(rendered.error.message, parameter="messages")
        _, (prompt,) = rendered
        return list(prompt["prompt_token_ids"])  # type: ignore[typeddict-item]

    async def hashes(self, renderer: OnlineRenderer, keys: PromptKeys) -> list[bytes]:
        """The hashes of the prompt's full blocks, under the salt of the tenant who asks; see `token_ids`."""
        return self.hashes_of(await self.token_ids(renderer), keys)

    def hashes_of(self, token_ids: list[int], keys: PromptKeys) -> list[bytes]:
        """The hashes of the full blocks of what `token_ids` has returned. Raises as that does."""
        return keys.hashes(token_ids, self.salt(keys), self.model)

    def salt(self, keys: PromptKeys) -> str:
        """The salt that the prompt has. Raises VLLMValidationError (400) for a bad `kv_cache` or `model`."""
        keys.require_model(self.model)
        return keys.salt(current_request().tenant, self.cache_salt, read_field(self.kv_cache), self.model)

    def fidelity(self, keys: PromptKeys) -> Fidelity:
        """What the prompt's requests would be computed under. Raises VLLMValidationError (400) for a bad `kv_cache`."""
        return keys.fidelity.of(current_request().tenant, read_field(self.kv_cache))


class PromptOrNode(PromptParam):
    """A prompt of the tenant who asks, or a segment of the index with all that it follows on."""

    node: str | None = Field(
        None,
        pattern="^([0-9a-fA-F]{2}){1,64}$",
        description="In place of a prompt: the `id` of a node of `GET /api/v1/kv/trie`.",
    )

    def node_key(self) -> bytes | None:
        """The node's key; None: a prompt is named. Raises VLLMValidationError where both are."""
        if self.node is None:
            return None
        given = next((name for name in PromptParam.model_fields if getattr(self, name) is not None), None)
        if given is not None:
            raise VLLMValidationError(f"`{given}` is of a prompt: give one, or `node`.", parameter=given)
        return bytes.fromhex(self.node)
