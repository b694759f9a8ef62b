"""Every check of a configuration that has been read, in order, and what one answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from app.checks.architecture import check_architecture
from app.checks.chat_template import check_chat_template
from app.checks.model_files import check_model_files, check_weights
from app.checks.vllm_source import require_parsers
from configs.errors import SettingsError
from configs.lora_adapters import require_adapter
from configs.model_folder import find_model
from configs.settings import Settings
from deployments.manager.config import require_policy
from deployments.redis_tier.config import require_redis


@dataclass(frozen=True, slots=True)
class Said:
    """What a check found, in words. Not `well`: the server starts, and lacks something."""

    words: str
    well: bool = True


@dataclass(frozen=True, slots=True)
class Check:
    """One look at a `part` of the configuration. `look` raises SettingsError where that cannot work."""

    part: str
    look: Callable[[], Said]


def checks_of(settings: Settings) -> list[Check]:
    """What has to hold on any machine. `app.launch.plan` adds what its own machine must have room for."""
    model = find_model(settings.model)
    folder = model if isinstance(model, Path) else None
    extra = settings.engine.extra_args

    def files() -> Said:
        if folder is None:
            return Said(f"{model} is loaded from the hub, and looked at then")
        return Said(f"{check_architecture(folder, extra)}; {check_model_files(folder, extra)}")

    def adapters() -> Said:
        for name, adapter in settings.engine.lora_adapters.items():
            try:
                check_weights(require_adapter(adapter.folder)[1])
            except (ValueError, OSError) as error:
                raise SettingsError(f"engine.lora_adapters: {name[:60]}: {error}") from None
        return Said(", ".join(settings.engine.lora_adapters) or "none")

    def redis() -> Said:
        words, well = require_redis(settings)
        return Said(words, well)

    return [
        Check("model", files),
        Check("chat_template", lambda: Said(check_chat_template(folder, settings.chat_template, extra))),
        Check("engine", lambda: Said(f"parsers: {require_parsers(settings.engine)}")),
        Check("engine.lora_adapters", adapters),
        Check("kv.eviction_policy", lambda: Said(require_policy(settings))),
        Check("kv.redis_url", redis),
    ]


def require_startable(settings: Settings) -> None:
    """Raise SettingsError, in one sentence, for settings that no server can start with. Blocks for a second at most,
    or as long as a required Redis takes."""
    for check in checks_of(settings):
        check.look()
