"""What `app` leans on inside vLLM. Red after an upgrade means: read the named module's list of symbols again."""

from __future__ import annotations

import inspect

import pytest
from fastapi import FastAPI
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.generate.base.serving import GenerateBaseServing
from vllm.entrypoints.openai.chat_completion import api_router as chat_router
from vllm.entrypoints.openai.completion import api_router as completion_router
from vllm.entrypoints.openai.models import api_router as models_router
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve.engine.protocol import ErrorInfo, UsageInfo
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
from vllm.entrypoints.serve.tokenize import api_router as tokenize_router
from vllm.entrypoints.serve.tokenize.serving import ServingTokenization
from vllm.exceptions import GracefulHTTPError
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.input_processor import InputProcessor

from app.backend.engine_elsewhere import EngineElsewhere
from app.openai.api import ChatServing, CompletionServing
from app.openai.engine_client import HandleEngineClient


def parameters(function: object) -> set[str]:
    return set(inspect.signature(function).parameters)  # type: ignore[arg-type]


def test_every_abstract_method_of_an_engine_client_is_there():
    assert not HandleEngineClient.__abstractmethods__  # type: ignore[attr-defined]
    assert parameters(EngineClient.generate) >= {
        "prompt", "sampling_params", "request_id", "lora_request", "trace_headers", "priority", "reasoning_ended",
        "reasoning_parser_kwargs",
    }  # fmt: skip
    assert parameters(EngineClient.check_admission) == {"self", "n", "request_id"}


def test_serving_classes_ask_an_engine_client_for_no_more_than_we_give():
    """Whatever vLLM's serving classes read of the client must exist on ours."""
    import re

    for cls in (*ChatServing.__mro__, *CompletionServing.__mro__, OpenAIServingModels):
        if cls is object or not cls.__module__.startswith("vllm."):
            continue
        for name in re.findall(r"engine_client\.(\w+)", inspect.getsource(cls)):
            ours = {*vars(HandleEngineClient), *vars(EngineElsewhere), *HandleEngineClient.__init__.__code__.co_names}
            assert name in ours, f"{cls.__name__} asks for engine_client.{name}"


def test_preflight_admits_before_the_prompt_is_rendered():
    source = inspect.getsource(GenerateBaseServing._preflight)
    assert source.index("dead_error") < source.index("check_admission(n)")
    for serving in (ChatServing.__mro__[1], CompletionServing.__mro__[1]):
        render = next(name for name in ("render_chat_request", "render_completion_request") if name in vars(serving))
        source = inspect.getsource(vars(serving)[render])
        assert source.index("_preflight(") < source.index("online_renderer.")


@pytest.mark.parametrize(
    ("router", "paths"),
    [
        (chat_router.router, {"/v1/chat/completions"}),
        (completion_router.router, {"/v1/completions"}),
        (models_router.router, {"/v1/models"}),
        (tokenize_router.router, {"/tokenize", "/detokenize"}),
    ],
)
def test_the_routes_are_where_we_put_them(router, paths: set[str]):
    assert {route.path for route in router.routes} >= paths


def test_state_names_that_the_routes_read():
    assert "state.openai_serving_chat" in inspect.getsource(chat_router)
    assert "state.openai_serving_completion" in inspect.getsource(completion_router)
    assert "state.openai_serving_models" in inspect.getsource(models_router)
    assert "state.serving_tokenization" in inspect.getsource(tokenize_router)


def test_arguments_of_the_classes_we_build():
    assert parameters(ChatServing.__mro__[1].__init__) >= {
        "engine_client", "models", "response_role", "online_renderer", "request_logger", "chat_template",
        "chat_template_content_format", "enable_auto_tools", "tool_parser", "reasoning_parser",
        "enable_prompt_tokens_details",
    }  # fmt: skip
    assert parameters(CompletionServing.__init__) >= {"engine_client", "models", "online_renderer", "request_logger"}
    assert parameters(OnlineRenderer.__init__) >= {"model_config", "renderer", "enable_auto_tools", "reasoning_parser"}
    assert parameters(ServingTokenization.__init__) >= {"models", "online_renderer", "chat_template"}
    assert parameters(InputProcessor.process_inputs) >= {"request_id", "prompt", "params", "supported_tasks"}
    assert parameters(SamplingParams.verify) == {
        "self", "model_config", "speculative_config", "structured_outputs_config", "tokenizer"
    }  # fmt: skip


def test_vllms_handlers_need_no_more_state_than_they_get():
    app = FastAPI()
    init_exception_handler(app)
    assert GracefulHTTPError("busy", 429).http_status == 429  # type: ignore[arg-type]


def test_error_and_usage_have_the_documented_fields():
    assert set(ErrorInfo.model_fields) == {"message", "type", "param", "code"}
    usage = UsageInfo(prompt_tokens=1)
    usage.kv_cache = {"device": 1}  # type: ignore[attr-defined]
    assert usage.model_dump()["kv_cache"] == {"device": 1}
