"""POST /tokenize, for texts that a request could send: no longer than the model's context. POST /detokenize, for tokens
that there are.

Leans on vLLM: `ServingTokenization.create_tokenize` asks the request itself for its `TokenizeParams`, in which
vLLM sets no limit, and takes subclasses of its two requests.
"""

from __future__ import annotations

import dataclasses

from fastapi import Request
from starlette.responses import Response
from vllm.config import ModelConfig
from vllm.entrypoints.serve.tokenize.api_router import detokenize, tokenize
from vllm.entrypoints.serve.tokenize.protocol import (
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
)
from vllm.renderers import TokenizeParams


class BoundedTokenizeCompletionRequest(TokenizeCompletionRequest):
    """vLLM's, with a limit."""

    def build_tok_params(self, model_config: ModelConfig) -> TokenizeParams:
        """See vLLM's."""
        return _limited(super().build_tok_params(model_config), model_config)


class BoundedTokenizeChatRequest(TokenizeChatRequest):
    """vLLM's, with a limit."""

    def build_tok_params(self, model_config: ModelConfig) -> TokenizeParams:
        """See vLLM's."""
        return _limited(super().build_tok_params(model_config), model_config)


def _limited(params: TokenizeParams, model_config: ModelConfig) -> TokenizeParams:
    return dataclasses.replace(
        params, max_total_tokens=model_config.max_model_len, max_total_tokens_param="max_model_len"
    )


async def tokenize_within_context(
    request: BoundedTokenizeCompletionRequest | BoundedTokenizeChatRequest, raw_request: Request
) -> Response:
    """The token ids that a text or a chat is made into. Texts beyond the model's context are refused."""
    return await tokenize(request, raw_request)


async def detokenize_known(request: DetokenizeRequest, raw_request: Request) -> Response:
    """The text that token ids stand for. Ids that the model does not have are refused."""
    raw_request.app.state.engine_client.renderer.validate_token_ids(request.tokens, parameter="tokens")
    return await detokenize(request, raw_request)
