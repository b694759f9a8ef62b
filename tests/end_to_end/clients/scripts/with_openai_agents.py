"""OpenAI's Agents SDK, over Responses."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
from agents import (
    Agent,
    FunctionTool,
    ModelSettings,
    OpenAIResponsesModel,
    Runner,
    ToolsToFinalOutputResult,
    set_tracing_disabled,
)
from agents.exceptions import ModelBehaviorError
from cases import CASES, CUT, KEY, MODEL, STEPS, TOKENS, TOLD, TOOL, UNKNOWN, URL, Look, refused, tell

CLIENT = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY)
set_tracing_disabled(True)


def agent(model: str = MODEL, max_tokens: int = TOKENS, choice: str | None = None, **more: Any) -> Agent[Any]:
    how = ModelSettings(temperature=0, max_tokens=max_tokens, tool_choice=choice)
    spoken = OpenAIResponsesModel(model=model, openai_client=CLIENT)
    return Agent(name="crosskv", instructions=CASES["system"], model=spoken, model_settings=how, **more)


def chat() -> str:
    return str(Runner.run_sync(agent(), CASES["question"]).final_output)


def stream() -> list[str]:
    async def pieces() -> list[str]:
        running = Runner.run_streamed(agent(), CASES["question"])
        events = [event.data async for event in running.stream_events() if event.type == "raw_response_event"]
        return [event.delta for event in events if event.type == "response.output_text.delta"]

    return asyncio.run(pieces())


def tools() -> list[str]:
    places: list[str] = []

    async def look(context: Any, arguments: str) -> str:
        places.append(Look.model_validate_json(arguments).place)
        return TOLD

    def enough(context: Any, results: Any) -> ToolsToFinalOutputResult:
        return ToolsToFinalOutputResult(is_final_output=len(places) >= STEPS, final_output="")

    tool = FunctionTool(TOOL["name"], TOOL["description"], TOOL["parameters"], look)
    looking = agent(choice="required", tools=[tool], reset_tool_choice=False, tool_use_behavior=enough)
    Runner.run_sync(looking, CASES["errand"])
    return places


def structured() -> str:
    return str(Runner.run_sync(agent(output_type=Look), CASES["question"]).final_output.place)


def cut() -> str:
    try:
        Runner.run_sync(agent(max_tokens=CUT), CASES["question"])
    except ModelBehaviorError as raised:
        return "max_output_tokens" if "max_output_tokens" in str(raised) else str(raised)
    return "nothing was raised"


def error() -> list[Any]:
    return refused(openai.NotFoundError, lambda: Runner.run_sync(agent(UNKNOWN), CASES["question"]))


tell("openai-agents", chat, stream, tools, structured, cut, error)
