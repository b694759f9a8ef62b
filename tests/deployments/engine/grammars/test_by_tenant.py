"""Grammars that an engine has compiled are remembered for the tenant that brought them, and for no other one."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from configs.settings import load_settings
from deployments.engine.engine_args import engine_config
from deployments.engine.grammars import by_tenant
from deployments.engine.grammars.by_tenant import GrammarsByTenant, keep_grammars_apart
from deployments.protocol.engine_hints import EngineHints

BACKENDS = ("xgrammar", "guidance", "outlines")


@pytest.fixture(scope="module")
def config(demo_model: Path) -> VllmConfig:
    return engine_config(load_settings({"model": str(demo_model), "dtype": "float32"}))


def request(backend: str, name: str, tenant: str | None) -> Request:
    """Asks for an object with a field of this name."""
    schema = {"type": "object", "properties": {name: {"type": "integer"}}, "required": [name]}
    constraint = StructuredOutputsParams(json=json.dumps(schema))
    constraint._backend = backend
    transfer = {} if tenant is None else {"kv_transfer_params": EngineHints(tenant=tenant).as_transfer()}
    return Request("r", [1], SamplingParams(structured_outputs=constraint, extra_args=transfer), None)


def apart_of(manager: StructuredOutputManager) -> GrammarsByTenant:
    keep_grammars_apart(manager)
    created: Any = manager._create_grammar
    apart: GrammarsByTenant = created.__self__
    return apart


def grammar(manager: StructuredOutputManager, one: Request) -> Any:
    manager.grammar_init(one)
    assert one.structured_output_request is not None
    compiling: Any = one.structured_output_request._grammar
    return compiling.result()


def remembered(apart: GrammarsByTenant) -> dict[str, int]:
    """How much, in the units of each cache."""
    found = {}
    for tenant, backend in apart._backends.items():
        compiler = getattr(backend, "compiler", None)
        found[tenant] = compiler.get_cache_size_bytes() if compiler else len(getattr(backend, "cache", ()))
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_grammar_is_compiled_once_for_each_tenant(config: VllmConfig, backend: str) -> None:
    manager = StructuredOutputManager(config)
    apart = apart_of(manager)
    grammar(manager, request(backend, "secret", "alice"))
    alices = remembered(apart)["alice"]
    grammar(manager, request(backend, "secret", "alice"))
    assert remembered(apart) == {"alice": alices}, "her own is remembered"
    grammar(manager, request(backend, "secret", "bob"))
    assert remembered(apart) == {"alice": alices, "bob": alices}, "and his is compiled for him"
    if backend in ("xgrammar", "outlines"):
        assert alices > 0
        grammar(manager, request(backend, "another", "bob"))
        assert remembered(apart)["bob"] > alices == remembered(apart)["alice"]
    grammar(manager, request(backend, "secret", None))
    assert set(remembered(apart)) == {"alice", "bob", ""}


def test_what_is_remembered_is_bounded_and_the_longest_idle_tenants_goes_first(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(by_tenant, "MOST_TENANTS", 2)
    manager = StructuredOutputManager(config)
    apart = apart_of(manager)
    for tenant in ("alice", "bob", "alice", "carol"):
        grammar(manager, request("xgrammar", "secret", tenant))
    assert list(remembered(apart)) == ["alice", "carol"]
    limit = max(remembered(apart).values()) + 1
    for backend in apart._backends.values():
        backend.compiler = SimpleNamespace(
            cache_limit_bytes=limit, get_cache_size_bytes=backend.compiler.get_cache_size_bytes
        )
    apart._of("carol")
    assert list(remembered(apart)) == ["carol"], "both are more than one may be"
