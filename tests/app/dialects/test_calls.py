"""A call that was cut is read as a stream tells it; the grammar of a forced call has its tool's schema."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionResponse
from vllm.exceptions import VLLMValidationError
from vllm.parser.parser_manager import ParserManager
from vllm.sampling_params import StructuredOutputsParams
from vllm.tokenizers import get_tokenizer

from app.dialects.calls import holding_forced_calls, level_of_vllm, reading_cut_calls, rendered_with_grammar
from app.gate import request_context
from app.protocols.messages import MessagesServing
from configs.model_folder import PROJECT_ROOT
from configs.settings import Settings, load_settings

NAME = "look_up"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": NAME,
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
        },
    }
]
NAMED = {"type": "function", "function": {"name": NAME}}
CHOICES = ("required", NAMED, "auto")
SAID = {
    "hermes": '<tool_call>\n{"name": "look_up", "arguments": {"place": "the old har',
    "qwen3_coder": "<tool_call>\n<function=look_up>\n<parameter=place>\nthe old har",
}
CUT = '{"place": "the old har'


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return get_tokenizer(str(PROJECT_ROOT / "models" / "demo"))


@pytest.fixture
def context() -> Iterator[SimpleNamespace]:
    """What the parsers look at, of the request's."""
    context = SimpleNamespace(cut=frozenset({0}), lax_calls=False)
    token = request_context._current.set(context)  # type: ignore[arg-type]
    yield context
    request_context._current.reset(token)


def settings(level: str = "forced") -> Settings:
    return load_settings({"engine": {"tool_call_parser": "hermes", "tool_strict_level": level}})


def parser_class(tokenizer: Any, name: str = "hermes", level: str = "auto") -> Any:
    return ParserManager.get_parser(
        tool_parser_name=name,
        reasoning_parser_name="",
        enable_auto_tools=True,
        tool_strict_level=level,
        model_name="demo",
        is_harmony=False,
        tokenizer=tokenizer,
    )


def asking(choice: Any, **tool: Any) -> ChatCompletionRequest:
    tools = [{**TOOLS[0], "function": {**TOOLS[0]["function"], **tool}}]  # type: ignore[dict-item]
    body = {"model": "demo", "messages": [{"role": "user", "content": "x"}], "tools": tools, "tool_choice": choice}
    return ChatCompletionRequest.model_validate(body)


def read(made: Any, tokenizer: Any, text: str, request: Any) -> tuple[Any, Any, list[tuple[str, str]]]:
    parser = made(tokenizer, request.tools)
    parser.set_prompt_token_ids([1])
    ids = tokenizer.encode(text, add_special_tokens=False)
    reasoning, content, calls = parser.parse(text, request, enable_auto_tools=True, model_output_token_ids=ids)
    return reasoning, content, [(call.name, call.arguments) for call in calls or ()]


@pytest.mark.parametrize("name", SAID)
@pytest.mark.parametrize("choice", CHOICES, ids=["required", "named", "auto"])
def test_a_call_that_was_cut_is_a_call_with_what_was_said_of_it(
    tokenizer: Any, context: SimpleNamespace, name: str, choice: Any
) -> None:
    vllms, request = parser_class(tokenizer, name), asking(choice)
    made = reading_cut_calls(vllms)
    assert read(made, tokenizer, SAID[name], request) == (None, None, [(NAME, CUT)])
    context.cut = frozenset()
    assert read(made, tokenizer, SAID[name], request) == read(vllms, tokenizer, SAID[name], request), "vLLM's own"


def test_an_answer_without_a_call_that_was_cut_is_what_it_was(tokenizer: Any, context: SimpleNamespace) -> None:
    made = reading_cut_calls(parser_class(tokenizer))
    assert read(made, tokenizer, "The lamp is in the", asking("auto")) == (None, "The lamp is in the", [])


def constrained(made: Any, tokenizer: Any, request: Any) -> bool:
    """Whether the request's grammar has the tool's schema."""
    made(tokenizer, request.tools).adjust_request(request)
    constraint = request.structured_outputs
    return constraint is not None and '"place"' in (constraint.structural_tag or json.dumps(constraint.json or ""))


@pytest.mark.parametrize("choice", CHOICES, ids=["required", "named", "auto"])
def test_the_schema_of_a_forced_call_is_in_its_grammar(tokenizer: Any, context: SimpleNamespace, choice: Any) -> None:
    forced = choice != "auto"
    made = holding_forced_calls(parser_class(tokenizer), settings())
    assert constrained(made, tokenizer, asking(choice)) == forced
    assert constrained(made, tokenizer, asking(choice, strict=True)), "as the tool says"
    context.lax_calls = True
    assert not constrained(made, tokenizer, asking(choice)), "vLLM's own"


@pytest.mark.parametrize("choice", CHOICES, ids=["required", "named", "auto"])
def test_a_grammar_that_cannot_be_had_with_the_schemas_is_had_without(context: SimpleNamespace, choice: Any) -> None:
    request, checked = asking(choice, strict=choice == "auto"), list[Any]()
    form = request.response_format

    async def render() -> str:
        assert (request.structured_outputs, request.response_format) == (None, form), "as it came"
        request.structured_outputs = StructuredOutputsParams(regex="lax" if context.lax_calls else "strict")
        return request.structured_outputs.regex or ""

    async def check(constraint: Any) -> None:
        checked.append(constraint.regex)
        if constraint.regex == "strict":
            raise VLLMValidationError("it is too large")

    rendering = rendered_with_grammar(request, "response_format", render, check)
    if choice == "auto":
        with pytest.raises(VLLMValidationError):
            asyncio.run(rendering)
        assert checked == ["strict"], "the client asks for it, and is told"
    else:
        assert asyncio.run(rendering) == "lax"
        assert checked == ["strict", "lax"]


def test_other_levels_are_vllms(tokenizer: Any, context: SimpleNamespace) -> None:
    for level in ("auto", "function", "parameter"):
        chosen = settings(level)
        assert level_of_vllm(chosen) == level
        vllms = parser_class(tokenizer, level=level)
        assert holding_forced_calls(vllms, chosen) is vllms
    assert level_of_vllm(settings()) == "auto"


@pytest.mark.parametrize(
    ("said", "told"), [(CUT, {"place": "the old har"}), ("", {}), ('{"pl', {}), ("[1, 2", {}), ('{"a": 1}', {"a": 1})]
)
def test_messages_tell_as_much_of_a_cut_calls_input_as_was_said(context: SimpleNamespace, said: str, told: Any) -> None:
    context.kv_usage = SimpleNamespace(fields=lambda: None)
    call = {"id": "call_1", "type": "function", "function": {"name": NAME, "arguments": said}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    choice = {"index": 0, "message": message, "finish_reason": "length"}
    usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
    answer = ChatCompletionResponse.model_validate({"model": "demo", "choices": [choice], "usage": usage})
    serving = object.__new__(MessagesServing)
    converted = serving.messages_full_converter(answer)
    assert converted.stop_reason == "max_tokens"
    assert [(block.type, block.name, block.input) for block in converted.content] == [("tool_use", NAME, told)]
