"""Pydantic AI, over chats of OpenAI's."""

from __future__ import annotations

from typing import Any

from cases import CASES, CUT, KEY, MODEL, STEPS, TOKENS, TOLD, TOOL, UNKNOWN, URL, Look, refused, tell
from pydantic_ai import Agent, NativeOutput, ToolDefinition
from pydantic_ai.direct import model_request_sync
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.messages import ModelRequest, ToolReturnPart
from pydantic_ai.models import ModelRequestParameters
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

PROVIDER = OpenAIProvider(base_url=f"{URL}/v1", api_key=KEY)


def agent(model: str = MODEL, max_tokens: int = TOKENS, **more: Any) -> Agent[None, Any]:
    settings: Any = {"temperature": 0, "max_tokens": max_tokens}
    return Agent(OpenAIChatModel(model, provider=PROVIDER), model_settings=settings, retries=0, **more)


def chat() -> str:
    return str(agent(system_prompt=CASES["system"]).run_sync(CASES["question"]).output)


def stream() -> list[str]:
    answer = agent(system_prompt=CASES["system"]).run_stream_sync(CASES["question"])
    return list(answer.stream_text(delta=True, debounce_by=None))


def tools() -> list[str]:
    look = ToolDefinition(name=TOOL["name"], description=TOOL["description"], parameters_json_schema=TOOL["parameters"])
    forced = ModelRequestParameters(function_tools=[look], allow_text_output=False)
    messages: list[Any] = [ModelRequest.user_text_prompt(CASES["errand"])]
    places = []
    for _ in range(STEPS):
        answer = model_request_sync(
            OpenAIChatModel(MODEL, provider=PROVIDER), messages,
            model_settings={"temperature": 0, "max_tokens": TOKENS}, model_request_parameters=forced,
        )  # fmt: skip
        (call,) = answer.tool_calls
        places.append(call.args_as_dict()["place"])
        messages += [answer, ModelRequest([ToolReturnPart(call.tool_name, TOLD, tool_call_id=call.tool_call_id)])]
    return places


def structured() -> str:
    return str(agent(output_type=NativeOutput(Look)).run_sync(CASES["question"]).output.place)


def cut() -> str:
    answer = agent(max_tokens=CUT, system_prompt=CASES["system"]).run_sync(CASES["question"])
    return str(answer.all_messages()[-1].finish_reason)


def error() -> list[Any]:
    return refused(ModelHTTPError, lambda: agent(UNKNOWN).run_sync(CASES["question"]))


tell("pydantic-ai-slim", chat, stream, tools, structured, cut, error)
