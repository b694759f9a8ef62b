"""JSON may have so much whitespace in a row and no more, in answers and in arguments of calls; none where asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from configs.settings import load_settings
from deployments.engine.engine_args import engine_config
from deployments.engine.grammars.by_tenant import keep_grammars_apart

BOUND = 3
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


def config(demo_model: Path, bound: int | None) -> VllmConfig:
    settings = {"model": str(demo_model), "dtype": "float32", "engine": {"json_whitespace": bound}}
    return engine_config(load_settings(settings))


@pytest.fixture(scope="module")
def bounded(demo_model: Path) -> VllmConfig:
    return config(demo_model, BOUND)


def spaced(count: int) -> str:
    return "{" + count * "\n" + '"a":1}'


def taken(vllm_config: VllmConfig, backend: str, text: str, **constraint: Any) -> bool:
    """Whether a model may say `text` and end there."""
    params = StructuredOutputsParams(**constraint)
    params._backend = backend
    manager = StructuredOutputManager(vllm_config)
    keep_grammars_apart(manager)
    request = Request("r", [1], SamplingParams(structured_outputs=params), None)
    manager.grammar_init(request)
    assert request.structured_output_request is not None
    compiling: Any = request.structured_output_request._grammar
    grammar = compiling.result()
    tokenizer = manager.tokenizer
    tokens = [token for character in text for token in tokenizer.encode(character, add_special_tokens=False)]
    assert tokenizer.decode(tokens) == text
    return bool(grammar.accept_tokens("r", [*tokens, tokenizer.eos_token_id]))


@pytest.mark.parametrize("backend", ["xgrammar", "guidance", "outlines"])
@pytest.mark.parametrize("constraint", [{"json": json.dumps(SCHEMA)}, {"json_object": True}], ids=["schema", "object"])
def test_whitespace_ends(bounded: VllmConfig, backend: str, constraint: dict[str, Any]) -> None:
    if backend == "outlines" and "json_object" in constraint:
        pytest.skip("vLLM has no JSON objects with outlines")
    assert taken(bounded, backend, spaced(0), **constraint)
    assert not taken(bounded, backend, spaced(BOUND + 1), **constraint)
    if backend == "xgrammar":  # the others have none, or one
        assert taken(bounded, backend, spaced(BOUND), **constraint)


@pytest.mark.parametrize("backend", ["xgrammar", "guidance"])
def test_a_request_may_ask_for_none_and_an_operator_for_no_bound(
    bounded: VllmConfig, demo_model: Path, backend: str
) -> None:
    schema = json.dumps(SCHEMA)
    assert taken(bounded, backend, spaced(0), json=schema, disable_any_whitespace=True)
    assert not taken(bounded, backend, spaced(1), json=schema, disable_any_whitespace=True)
    assert taken(config(demo_model, None), backend, spaced(BOUND + 100), json=schema)


def test_the_arguments_of_a_call_are_bounded_as_well(bounded: VllmConfig) -> None:
    content = {"type": "json_schema", "json_schema": SCHEMA}
    call = {"type": "tag", "begin": "<call>", "content": content, "end": "</call>"}
    tags = {"type": "triggered_tags", "triggers": ["<call>"], "tags": [call], "at_least_one": True}
    tag = json.dumps({"type": "structural_tag", "format": tags})
    assert taken(bounded, "xgrammar", f"<call>{spaced(BOUND)}</call>", structural_tag=tag)
    assert not taken(bounded, "xgrammar", f"<call>{spaced(BOUND + 1)}</call>", structural_tag=tag)
