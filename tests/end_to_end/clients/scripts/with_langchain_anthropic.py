"""LangChain's `ChatAnthropic`."""

from __future__ import annotations

from typing import Any

import anthropic
from cases import KEY, MODEL, TOKENS, URL
from langchain_anthropic import ChatAnthropic
from langchain_cases import tell_of


def model(**more: Any) -> ChatAnthropic:
    usual = {"model": MODEL, "base_url": URL, "api_key": KEY, "temperature": 0, "max_tokens": TOKENS}
    return ChatAnthropic(**{**usual, **more})


tell_of("langchain-anthropic", model, anthropic.NotFoundError, "max_tokens", "stop_reason")
