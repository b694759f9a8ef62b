"""How true a prompt's KV must be: what its request says, else its tenant's setting, else the deployment's.

A request says it in a field of ours, `{"kv_cache": {"fidelity": "exact" | "tolerant"}}` (the official client's
`extra_body`), which OpenAI's protocol lets pass and vLLM ignores: nothing of it reaches an engine.
docs/concepts/compression.md says what follows from the choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast, get_args

from vllm.exceptions import VLLMValidationError

from kvmanager.segments.keys import EXACT, Fidelity

FIELD = "kv_cache"
_NAMES: tuple[str, ...] = get_args(Fidelity)


@dataclass(frozen=True, slots=True)
class FidelityRule:
    """The settings `kv.fidelity` and `kv.tenant_fidelity`."""

    deployment: Fidelity = EXACT
    by_tenant: Mapping[str, Fidelity] = field(default_factory=dict)

    def of(self, tenant: str, asked: Fidelity | None) -> Fidelity:
        """The fidelity of a tenant's prompt whose request asked for that (None: said nothing)."""
        return asked or self.by_tenant.get(tenant, self.deployment)


def read_fidelity(value: object, param: str = f"{FIELD}.fidelity") -> Fidelity | None:
    """What a client gave as `param`; None when it gave nothing. Raises VLLMValidationError (400) for what is none."""
    if value is not None and value not in _NAMES:
        shown = " or ".join(f"`{name}`" for name in _NAMES)
        raise VLLMValidationError(f"`{param}` must be {shown}.", parameter=param)
    return cast("Fidelity | None", value)


def read_field(value: object) -> Fidelity | None:
    """The fidelity in a body's field `kv_cache`, as `read_fidelity`; whatever else it holds is refused too."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise VLLMValidationError(f'`{FIELD}` must be an object, such as {{"fidelity": "tolerant"}}.', parameter=FIELD)
    unknown = next((name for name in value if name != "fidelity"), None)
    if unknown is not None:
        param = f"{FIELD}.{unknown[:64]}"
        raise VLLMValidationError(f"`{param}` is not known; `{FIELD}` takes `fidelity` only.", parameter=param)
    return read_fidelity(value.get("fidelity"))
