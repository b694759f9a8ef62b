"""A cache of compiled grammars for each tenant: how long one takes says nothing of what another tenant has sent.

vLLM has one backend per engine, whose compiler remembers the grammars of all. Here each tenant has a copy of that
backend with a cache of its own. Both are forgotten for the tenant that has waited longest for its next one: where there
are more than `MOST_TENANTS`, and where xgrammar's caches together are larger than vLLM lets one be.

Leans on vLLM: `EngineCore.structured_output_manager`; `StructuredOutputManager._create_grammar`, called for a request
on an executor's thread, which reads `backend` alone; `XgrammarBackend.compiler`, an `xgrammar.GrammarCompiler`, and
`OutlinesBackend.cache`, a mapping. Its other backends remember no grammar. And on `Request.kv_transfer_params`.

Whitespace in JSON is bounded here too, as `deployments.engine.grammars.by_tenant` says, and a request that wants none
(`structured_outputs.disable_any_whitespace`, which vLLM's front takes and does not hand on) gets none. This leans on
`disable_any_whitespace` of `XgrammarBackend` and `GuidanceBackend`.
"""

from __future__ import annotations

import copy
import json
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from cachetools import LRUCache
from vllm.v1.structured_output import StructuredOutputManager
from xgrammar import CompiledGrammar, GrammarCompiler

from deployments.engine.engine_args import JSON_WHITESPACE
from deployments.protocol.engine_hints import hints_of

if TYPE_CHECKING:
    from vllm.v1.request import Request


MOST_TENANTS = 64
MOST_INDEXES = 16
"""Of a tenant's, in a cache of Outlines."""
_COMPILER_THREADS = 8  # vLLM's own number
_ANY = 'root ::= "a"'


def keep_grammars_apart(manager: StructuredOutputManager) -> None:
    """Give each tenant's requests grammars from a cache of its own. On the engine thread, before the first step."""
    manager._create_grammar = GrammarsByTenant(manager).create  # type: ignore[method-assign]


class GrammarsByTenant:
    """Any thread may call."""

    def __init__(self, manager: StructuredOutputManager) -> None:
        """`manager`: has the backend, from its first request on."""
        self._manager = manager
        configured: Any = manager.vllm_config.additional_config or {}
        self._most_whitespace: int | None = configured.get(JSON_WHITESPACE)
        self._backends: OrderedDict[str, Any] = OrderedDict()
        self._lock = threading.Lock()

    def create(self, request: Request) -> Any:
        """vLLM's grammar of a request's constraint; raises what its backend raises for one that is none."""
        tenant = hints_of(request.kv_transfer_params).tenant
        view = copy.copy(self._manager)
        view.backend = self._of(tenant)
        constraint = request.sampling_params.structured_outputs if request.sampling_params is not None else None
        if constraint is not None and constraint.disable_any_whitespace:
            view.backend = _without_whitespace(view.backend)
        return StructuredOutputManager._create_grammar(view, request)

    def _of(self, tenant: str) -> Any:
        with self._lock:
            backend = self._backends.pop(tenant, None) or _twin(self._manager.backend, self._most_whitespace)
            self._backends[tenant] = backend
            while len(self._backends) > MOST_TENANTS or self._too_large():
                self._backends.popitem(last=False)
            return backend

    def _too_large(self) -> bool:
        compilers = [compiler for each in self._backends.values() if (compiler := getattr(each, "compiler", None))]
        if len(compilers) < 2 or compilers[0].cache_limit_bytes < 0:
            return False
        return sum(each.get_cache_size_bytes() for each in compilers) > compilers[0].cache_limit_bytes


def _without_whitespace(backend: Any) -> Any:
    """A view of a backend whose JSON has none; they share a cache."""
    view = copy.copy(backend)
    view.disable_any_whitespace = True
    return view


def _twin(backend: Any, most_whitespace: int | None) -> Any:
    """The same backend, with nothing remembered, and a bound for whitespace."""
    twin = copy.copy(backend)
    compiler = getattr(backend, "compiler", None)
    if compiler is not None:
        from deployments.engine.grammars.by_tenant import BoundedCompiler  # loads xgrammar, which is here by now

        twin.compiler = BoundedCompiler(
            compiler.compile_grammar(_ANY).tokenizer_info,  # the compiler itself does not tell it
            max_threads=_COMPILER_THREADS,
            cache_limit_bytes=compiler.cache_limit_bytes,
        )
        twin.compiler.most = most_whitespace
    if hasattr(backend, "cache"):
        twin.cache = LRUCache(maxsize=MOST_INDEXES)
    if most_whitespace is not None and type(backend).__name__ == "GuidanceBackend":
        twin.disable_any_whitespace = True  # it has none or any number
    return twin


# xgrammar's compiler with a bound for JSON's whitespace: `engine.json_whitespace` characters in a row.
#
# Without one a model may write line feeds until its tokens are spent, and the answer is no JSON (vllm#38696). Guidance
# knows none or any number, and so has none under a bound; Outlines and lm-format-enforcer have bounds of their own: one
# space, and twelve.


_SCHEMAS = frozenset({"json_schema", "qwen_xml_parameter"})
"""Formats of a structural tag that are JSON, or hold it."""


class BoundedCompiler(GrammarCompiler):
    """Bounds whitespace where nothing else was asked for."""

    most: int | None = None

    def compile_json_schema(self, schema: Any, *, any_whitespace: bool = True, **options: Any) -> CompiledGrammar:
        """As `GrammarCompiler` does."""
        if any_whitespace:
            options = {"max_whitespace_cnt": self.most, **options}
        return super().compile_json_schema(schema, any_whitespace=any_whitespace, **options)

    def compile_structural_tag(self, *args: Any, **options: Any) -> CompiledGrammar:
        """As `GrammarCompiler` does; the old form with triggers has no place for a bound."""
        if self.most is not None and len(args) == 1 and isinstance(args[0], str):
            args = (json.dumps(_bounded(json.loads(args[0]), self.most)),)
        return super().compile_structural_tag(*args, **options)


def _bounded(part: Any, most: int) -> Any:
    """The same structural tag, whose schemas have a bound. Schemas themselves are not looked into."""
    if isinstance(part, list):
        return [_bounded(each, most) for each in part]
    if not isinstance(part, dict):
        return part
    if part.get("type") in _SCHEMAS and "json_schema" in part:
        return {**part, "max_whitespace_cnt": part.get("max_whitespace_cnt") or most}
    return {name: _bounded(each, most) for name, each in part.items()}
