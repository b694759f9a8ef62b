"""What `app.protocols` leans on inside vLLM. Red after an upgrade means: read the named module's docstring again."""

from __future__ import annotations

import inspect
import re

from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.renderers.online_renderer import OnlineRenderer

from app.backend.engine_elsewhere import EngineElsewhere
from app.openai.api import ERROR_EVENT, ChatServing
from app.openai.engine_client import HandleEngineClient
from app.protocols.messages import MessagesServing
from app.protocols.responses import ResponsesServing


def parameters(function: object) -> set[str]:
    return set(inspect.signature(function).parameters)  # type: ignore[arg-type]


def test_messages_are_chats_to_the_last_step():
    assert issubclass(AnthropicServingMessages, OpenAIServingChat)
    order = MessagesServing.__mro__
    assert order.index(ChatServing) < order.index(AnthropicServingMessages) < order.index(OpenAIServingChat)
    for name in ("create_chat_completion", "render_chat_request"):
        assert name not in vars(AnthropicServingMessages)
    assert "self.create_chat_completion(" in inspect.getsource(AnthropicServingMessages.create_messages)
    assert "self.message_stream_converter(" in inspect.getsource(AnthropicServingMessages.create_messages)
    assert "self.messages_full_converter(" in inspect.getsource(AnthropicServingMessages.create_messages)
    assert "self.render_chat_request(" in inspect.getsource(AnthropicServingMessages.count_tokens)


def test_responses_take_room_before_they_are_rendered_and_are_sent_when_they_are_read():
    source = inspect.getsource(OpenAIServingResponses._create_responses)
    assert source.index("self._preflight(") < source.index("self._render_resolved_response_inputs(")
    assert "engine_client.generate(" not in source
    assert inspect.isasyncgenfunction(OpenAIServingResponses._generate_with_builtin_tools)
    assert "online_renderer.render_responses(" in inspect.getsource(
        OpenAIServingResponses._render_resolved_response_inputs
    )
    assert parameters(OnlineRenderer.render_responses) >= {"request", "previous_messages", "tool_server"}


def test_a_stream_of_responses_begins_with_two_events_that_wait_for_nothing():
    source = inspect.getsource(OpenAIServingResponses.responses_stream_generator)
    first, second, computed = map(source.index, ("ResponseCreatedEvent(", "ResponseInProgressEvent(", "in processor("))
    assert first < second < computed
    assert source.count("yield _increment_sequence_number_and_return(") == 4


def test_nothing_is_stored_where_storing_is_not_enabled():
    source = inspect.getsource(OpenAIServingResponses._create_responses)
    assert source.index("request.store = False") < source.index("self.msg_store[")
    assert "self.enable_store = " in inspect.getsource(OpenAIServingResponses.__init__)
    assert "self.enable_store = False" in inspect.getsource(ResponsesServing.__init__)


def test_arguments_of_the_classes_we_build():
    shared = {
        "online_renderer", "request_logger", "chat_template", "chat_template_content_format", "enable_auto_tools",
        "tool_parser", "reasoning_parser", "enable_prompt_tokens_details",
    }  # fmt: skip
    assert parameters(OpenAIServingResponses.__init__) >= {"engine_client", "models", *shared}
    assert parameters(AnthropicServingMessages.__init__) >= {"engine_client", "models", "response_role", *shared}


def test_they_ask_an_engine_client_for_no_more_than_we_give():
    for cls in (OpenAIServingResponses, AnthropicServingMessages):
        for name in re.findall(r"engine_client\.(\w+)", inspect.getsource(cls)):
            ours = {*vars(HandleEngineClient), *vars(EngineElsewhere), *HandleEngineClient.__init__.__code__.co_names}
            assert name in ours, f"{cls.__name__} asks for engine_client.{name}"


def test_an_error_among_a_chats_events_begins_as_we_know_it():
    wrong = ErrorResponse.model_validate({"error": {"message": "m", "type": "t", "code": 400}})
    assert f"data: {wrong.model_dump_json()}".startswith(ERROR_EVENT)
