"""How a server would be set, from its configuration file: for mistakes that keep it from starting."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from app.cli.doctor.figures import Setup
from app.cli.doctor.gathered import setup_of
from app.cli.doctor.rules.ordinary_text import PAGE
from app.cli.failures import CommandError
from app.control.settings_shown import settings_shown, shape_of_kv
from configs.model_folder import find_model, kv_shape, own_max_tokens
from configs.settings import Settings, SettingsError, load_settings


def setup_from(config: Path) -> Setup:
    """Raises CommandError, with the sentence of the settings' own check, for a file that holds none."""
    try:
        settings = load_settings(_arguments(config))
    except SettingsError as error:
        raise CommandError(f"{config}: {error}") from None
    setup = setup_of(settings_shown(settings, _shape(settings)))
    return replace(setup, page_tokens=_page_tokens(settings)) if setup.separators_of_tokens else setup


def _page_tokens(settings: Settings) -> list[int] | None:
    """None of a hub's model, or one whose tokenizer is of another kind."""
    file = Path(settings.model_source) / "tokenizer.json"
    if not file.is_absolute() or not file.is_file():
        return None
    import tokenizers

    try:
        encoded = tokenizers.Tokenizer.from_file(str(file)).encode(PAGE, add_special_tokens=False)
    except Exception:  # what it raises for a file that is no tokenizer is no class of its own
        return None
    return list(encoded.ids)


def _shape(settings: Settings) -> Any:
    model = find_model(settings.model)
    shape, longest = kv_shape(model), own_max_tokens(model)
    return shape_of_kv(*shape, settings, longest) if shape and longest else None


def _arguments(config: Path) -> dict[str, Any]:
    """`args:` of the one application."""
    try:
        applications = yaml.safe_load(config.read_text(encoding="utf-8"))["applications"]
        (application,) = applications
        arguments = application.get("args") or {}
    except OSError as error:
        raise CommandError(f"{config} cannot be read ({error.strerror}).") from None
    except (yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError, ValueError, AttributeError):
        raise CommandError(
            f"{config} is no configuration with one application: give one as serve_config.yaml."
        ) from None
    if not isinstance(arguments, dict):
        raise CommandError(f"{config}: `args:` must hold settings by name.")
    return arguments
