"""How long a prompt's text takes to become tokens: the stage `tokenize`, inside the stage `render`.

Leans on vLLM: every renderer turns text into tokens by `_tokenize_prompt_async(prompt, params)`
(`tests/app/openai/test_vllm_contract.py`).
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

from vllm.renderers import BaseRenderer, TokenizeParams

from app.gate.request_context import current_request


def time_tokenizing(renderer: BaseRenderer) -> None:
    """Let `renderer` tell the stages of the HTTP request that it works for. Not to be called twice for one."""
    tokenize = renderer._tokenize_prompt_async

    async def tokenize_timed(prompt: Any, params: TokenizeParams) -> Any:
        began = time.monotonic()
        made = await tokenize(prompt, params)
        with contextlib.suppress(LookupError):  # while the server warms up there is no HTTP request
            current_request().stages.inside_next("tokenize", time.monotonic() - began)
        return made

    renderer._tokenize_prompt_async = tokenize_timed
