"""LangChain's `ChatOpenAI`."""

from __future__ import annotations

from typing import Any

import openai
from cases import KEY, MODEL, TOKENS, URL
from langchain_cases import tell_of
from langchain_openai import ChatOpenAI


def model(**more: Any) -> ChatOpenAI:
    usual = {"model": MODEL, "base_url": f"{URL}/v1", "api_key": KEY, "temperature": 0, "max_tokens": TOKENS}
    return ChatOpenAI(**{**usual, **more})


tell_of("langchain-openai", model, openai.NotFoundError, "max_tokens", "finish_reason")
