"""LangChain's six cases, the same for each of its chat models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cases import CASES, CUT, STEPS, TOLD, TOOL, UNKNOWN, Look, refused, tell
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import StructuredTool

ASKED: list[Any] = [SystemMessage(CASES["system"]), HumanMessage(CASES["question"])]


def tell_of(package: str, model: Callable[..., Any], error_type: type[Any], limit: str, reason: str) -> None:
    """`model` makes a chat model of arguments over the usual; `limit` is its word for the most tokens of an answer."""
    look = StructuredTool.from_function(
        lambda place: TOLD, name=TOOL["name"], description=TOOL["description"], args_schema=Look
    )

    def chat() -> str:
        return str(model().invoke(ASKED).text)

    def stream() -> list[str]:
        return [piece for chunk in model().stream(ASKED) if (piece := str(chunk.text))]

    def tools() -> list[str]:
        messages, places = [HumanMessage(CASES["errand"])], []
        bound = model().bind_tools([look], tool_choice="any")
        for _ in range(STEPS):
            said = bound.invoke(messages)
            (call,) = said.tool_calls
            places.append(call["args"]["place"])
            messages += [said, ToolMessage(look.invoke(call["args"]), tool_call_id=call["id"])]
        return places

    def structured() -> str:
        return str(model().with_structured_output(Look, method="json_schema").invoke(ASKED).place)

    def cut() -> str:
        return str(model(**{limit: CUT}).invoke(ASKED).response_metadata[reason])

    def error() -> list[Any]:
        return refused(error_type, lambda: model(model=UNKNOWN).invoke(ASKED))

    tell(package, chat, stream, tools, structured, cut, error)
