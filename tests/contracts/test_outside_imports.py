"""Which room may import what from outside: the brain is pure, and vLLM stays in its rooms."""

from __future__ import annotations

from source_imports import Import, imports, modules

BRAIN = {
    "__future__", "abc", "collections", "dataclasses", "enum", "fractions", "functools", "hashlib", "heapq", "hmac",
    "importlib", "inspect", "itertools", "math", "statistics", "struct", "sys", "typing", "weakref",
    "cbor2", "cryptography", "xxhash",
}  # fmt: skip
"""What kvmanager/ may import: no ray, torch, vllm or numpy, no sockets, files, threads or event loops, and neither time
nor randomness, which are passed in."""

NEVER: dict[str, set[str]] = {
    "app": {"torch"},
    "configs": {"numpy", "ray", "torch", "vllm"},
    "deployments.cpu_tier": {"torch", "vllm"},
    "deployments.engine": {"ray"},
    "deployments.manager": {"numpy", "torch", "vllm"},
    "deployments.port": {"torch", "vllm"},
    "deployments.redis_tier": {"numpy", "torch", "vllm"},
    "deployments.router": {"numpy", "torch", "vllm"},
    "deployments.segment_store": {"ray", "torch", "vllm"},
    "deployments.transfer": {"ray"},
    "kernels": {"ray", "vllm"},
    "kernels.entropy": {"ray", "torch", "vllm"},
    "kernels.sparse": {"ray", "torch", "vllm"},
    "load_tests.simulator": {"numpy", "ray", "torch", "vllm"},
    "models": {"ray"},
}
"""What a package or a room imports nowhere, not for types either. The engine meets the cluster through a port, so that
it can move into a process of its own; what Serve's controller and the tiers load stays light."""

VLLM_ROOMS = ("app.dialects", "app.openai", "app.protocols", "deployments.engine")

_ERRORS = "its errors carry their HTTP status, and vLLM's own handlers turn them into answers"

VLLM_ELSEWHERE: dict[str, str] = {
    "app.backend.engine_elsewhere": "the base of the ingress's EngineClient, which is vLLM's",
    "app.backend.replica_errors": _ERRORS,
    "app.extensions.blend.requests": "as the rooms whose requests it reads",
    "app.extensions.blend.separators": "documents are rendered as for an answer, to see what begins them",
    "app.extensions.states.ingress": "questions are rendered as for an answer, to see what begins a message",
    "app.continuation.moves": _ERRORS,
    "app.control.api": _ERRORS + "; prompts are rendered as for an answer",
    "app.control.diverge": "prompts are rendered as for an answer",
    "app.extensions.blend.precompute.orders": _ERRORS + "; prompts are rendered as for an answer",
    "app.control.moves": _ERRORS + "; prompts are rendered as for an answer",
    "app.control.orders": "prompts are rendered as for an answer",
    "app.control.prompt_param": "a prompt is checked and rendered as the OpenAI routes do it",
    "app.gate.admission": _ERRORS,
    "app.gate.auth": _ERRORS,
    "app.gate.errors": _ERRORS,
    "app.gate.json_route": _ERRORS,
    "app.gate.kv_cache_field": _ERRORS,
    "app.gate.not_done": _ERRORS,
    "app.gate.rates.limits": _ERRORS,
    "app.gate.request_bounds": _ERRORS + "; it knows which parts of a message are media",
    "app.ingress": "it builds the renderer, once, for all routes",
    "app.extensions.blend.precompute.chunks": "a chunk is a request with its sampling parameters",
    "app.metrics.usage": "it extends vLLM's `UsageInfo`",
}
"""Modules beside these rooms that import vLLM at their top, with the reason."""


def outside(package: str) -> list[Import]:
    """A package's imports that are no module of the project."""
    return [each for each in imports(package) if each.module not in modules()]


def test_the_brain_is_pure() -> None:
    impure = [str(each) for each in outside("kvmanager") if each.module.split(".")[0] not in BRAIN]
    assert impure == []


def test_no_room_imports_what_it_must_not_know() -> None:
    found = [
        str(each)
        for room, never in NEVER.items()
        for each in outside(room.split(".")[0])
        if f"{each.importer}.".startswith(f"{room}.") and each.module.split(".")[0] in never
    ]
    assert found == []


def test_vllm_is_imported_at_the_top_in_its_own_rooms_and_where_a_reason_is_given() -> None:
    """vLLM takes seconds and hundreds of megabytes: who needs no engine starts without it."""
    found = {
        each.importer
        for package in ("app", "configs", "deployments", "kernels", "kvmanager")
        for each in outside(package)
        if each.module.split(".")[0] == "vllm" and each.when == "top"
    }
    elsewhere = {module for module in found if not f"{module}.".startswith(tuple(f"{room}." for room in VLLM_ROOMS))}
    assert sorted(elsewhere) == sorted(VLLM_ELSEWHERE)
