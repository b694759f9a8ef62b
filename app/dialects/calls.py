"""Tool calls: one that a limit of tokens cuts is a call, streamed or not; the arguments of a forced one fit its tool.

vLLM's parsers read a whole answer in one way and a stream in another. Of a call that is cut, the first finds nothing,
or arguments that the model did not write (`{}`), and the model's envelope is sent as text; the second finds what there
is. Here an answer that was cut is read as a stream of one piece.

Where a request forces a call, vLLM's grammar has the call's envelope, and a tool's schema only if that is `strict`
(vllm#49661). With `engine.tool_strict_level: forced` it has the schema too, unless the grammar cannot be had with it.

Leans on vLLM: `Parser.adjust_request`, which reads `tool_strict_level`; `Parser.parse`; `Parser.set_prompt_token_ids`;
`Parser.parse_delta(text, ids, request, prompt_ids, finished=…)`. A parser keeps state, and a new one is made of the
same arguments. `OpenAIServingChat.parser_cls` and `OpenAIServingResponses.parser` are the classes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from vllm.entrypoints.generate.base.protocol import DeltaMessage, FunctionCall
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.exceptions import VLLMValidationError
from vllm.parser.abstract_parser import Parser
from vllm.tool_parsers.tool_strict_level import ToolStrictLevel

from app.gate.request_context import current_request
from configs.settings import Settings

FORCED = "forced"

Rendered = TypeVar("Rendered")
Parsed = tuple[str | None, str | None, list[FunctionCall] | None]


def level_of_vllm(settings: Settings) -> str:
    """What vLLM is to do for every request with tools."""
    level = settings.engine.tool_strict_level
    return "auto" if level == FORCED else level


def holding_forced_calls(parser_class: type[Parser] | None, settings: Settings) -> type[Parser] | None:
    """The same parser, whose grammar of a forced call has the tool's schema, unless the request's context is lax."""
    if parser_class is None or settings.engine.tool_strict_level != FORCED:
        return parser_class

    class ForcedCalls(parser_class):  # type: ignore[misc,valid-type]
        def adjust_request(self, request: Any) -> Any:
            if is_forced(request) and not current_request().lax_calls:
                self.tool_strict_level = ToolStrictLevel.PARAMETER
            return super().adjust_request(request)

    return ForcedCalls


def is_forced(request: Any) -> bool:
    """Whether the answer has to be a call."""
    return bool(request.tools) and request.tool_choice not in (None, "auto", "none")


async def rendered_with_grammar(
    request: Any, form: str, render: Callable[[], Awaitable[Rendered]], check: Callable[[Any], Awaitable[None]]
) -> Rendered:
    """What `render` makes of a request, whose grammar `check` takes; of a forced call once more without the schemas.

    `form`: the field besides `structured_outputs` that rendering takes the form of an answer from, and empties. Raises
    VLLMValidationError (400), as `check` does, for a grammar that the client itself asks for.
    """
    before = {name: getattr(request, name) for name in ("structured_outputs", form)}
    rendered = await render()
    if isinstance(rendered, ErrorResponse):
        return rendered
    try:
        await check(request.extract_structured_outputs())
    except VLLMValidationError:
        context = current_request()
        if context.lax_calls or not is_forced(request):
            raise
        context.lax_calls = True
        for name, value in before.items():
            setattr(request, name, value)
        rendered = await render()
        await check(request.extract_structured_outputs())
    return rendered


def reading_cut_calls(parser_class: type[Parser] | None) -> type[Parser] | None:
    """The same parser, which reads the calls of an answer that was cut as those of a stream."""
    if parser_class is None:
        return None

    made: Any = parser_class

    class CutCalls(made):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            self._again: Callable[[], Parser] = lambda: made(*args, **more)
            self._prompt: list[int] = []

        def set_prompt_token_ids(self, prompt_token_ids: Sequence[int]) -> None:
            self._prompt = list(prompt_token_ids)
            super().set_prompt_token_ids(prompt_token_ids)

        def parse(
            self,
            model_output: str,
            request: Any,
            enable_auto_tools: bool = False,
            model_output_token_ids: Sequence[int] = (),
        ) -> Parsed:
            if current_request().cut and request.tools and request.tool_choice != "none":
                reader = self._again()
                reader.set_prompt_token_ids(self._prompt)
                read = _as_stream(reader, model_output, request, model_output_token_ids, self._prompt)
                if read[2]:
                    return read
            return super().parse(model_output, request, enable_auto_tools, model_output_token_ids)

    return CutCalls


def _as_stream(parser: Parser, text: str, request: Any, ids: Sequence[int], prompt: list[int]) -> Parsed:
    pieces = [
        parser.parse_delta(text, list(ids), request, prompt, finished=False),
        parser.parse_delta("", [], request, prompt, finished=True),
    ]
    calls: dict[int, FunctionCall] = {}
    reasoning = content = ""
    for piece in pieces:
        if piece is None:
            continue
        reasoning += piece.reasoning or ""
        content += piece.content or ""
        _add(calls, piece)
    return reasoning or None, content or None, [calls[index] for index in sorted(calls)] or None


def _add(calls: dict[int, FunctionCall], piece: DeltaMessage) -> None:
    for part in piece.tool_calls:
        call = calls.setdefault(part.index, FunctionCall(name="", arguments=""))
        call.id = call.id or part.id
        if part.function is not None:
            call.name += part.function.name or ""
            call.arguments += part.function.arguments or ""
