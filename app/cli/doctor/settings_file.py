"""How a server would be set, from its configuration file: for mistakes that keep it from starting."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from app.cli.doctor.figures import Setup
from app.cli.doctor.gathered import setup_of
from app.cli.doctor.rules.ordinary_text import PAGE
from app.cli.failures import CommandError
from app.control.settings_shown import settings_shown, shape_of_kv
from app.launch.plan import Overrides, read_plan
from configs.model_folder import find_model, kv_shape, own_max_tokens
from configs.settings import Settings, SettingsError


def setup_from(config: Path) -> Setup:
    """Raises CommandError, with the sentence of the settings' own check, for a file that holds none."""
    try:
        settings = read_plan(config, Overrides()).settings
    except SettingsError as error:
        raise CommandError(str(error)) from None
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
