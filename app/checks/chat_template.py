"""Whether there is a chat template, and whether it makes a prompt of a plain message.

Leans on transformers: where a folder's templates lie (`chat_template.jinja`, `additional_chat_templates/`,
`tokenizer_config.json`, a processor's `chat_template.json`). On vLLM: the models for which it has templates of its own.
`tests/app/checks/test_chat_template.py` renders with both.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from app.checks.template_trial import Trial, tried
from app.checks.vllm_source import tables
from configs.errors import SettingsError
from configs.model_folder import PROJECT_ROOT, is_lfs_pointer, read_config, read_json

_FALLBACKS = "transformers_utils/chat_templates/registry.py", "_MODEL_TYPE_TO_CHAT_TEMPLATE_FALLBACK"
_OWN_FORMATS = ("tekken.json", "tokenizer.model.v*", "params.json")
"""Files of models whose tokenizer brings the format of chats with it."""
_OTHER_WORKS = "set chat_template to the path of a Jinja template that does"


def check_chat_template(folder: Path | None, chosen: str | None, extra_args: Mapping[str, Any]) -> str:
    """Say which template is used. `folder`: None for a hub's model, of which only the `chosen` one can be looked at.

    Raises SettingsError where there is none, or none that works.
    """
    try:
        if chosen is not None:
            file = PROJECT_ROOT / Path(chosen).expanduser()
            found = {"default": (f"chat_template: {chosen}", _text(file))}
        elif folder is None:
            return "the model's own"
        elif "tokenizer_mode" in extra_args or any(any(folder.glob(name)) for name in _OWN_FORMATS):
            return "the tokenizer's own format"
        else:
            found = _templates(folder)
    except ValueError as error:
        raise SettingsError(f"{'model' if chosen is None else 'chat_template'}: {error}.") from None
    if not found and folder is not None:
        file_name, table = _FALLBACKS
        if read_config(folder).get("model_type") in tables(file_name).get(table, ()):
            return "vLLM's own for this kind of model"
        raise SettingsError(
            f"chat_template: {folder} has no chat template, so chats could not be answered; set chat_template to the "
            f"path of a Jinja template, or add the model's chat_template.jinja."
        )
    if "default" not in found:
        raise SettingsError(
            f"chat_template: of the templates in {folder} none is called 'default' ({', '.join(found)[:80]}); "
            f"{_OTHER_WORKS}."
        )
    texts = tuple((name, text) for name, (_, text) in found.items())
    refused = tried(Trial(texts, tuple(_special_tokens(folder).items())))
    if refused is not None:
        raise SettingsError(f"chat_template: {found[refused.template][0]} {refused.why}; {_OTHER_WORKS}.")
    return found["default"][0]


def _templates(folder: Path) -> dict[str, tuple[str, str]]:
    """A folder's templates by their names, with where each stands."""
    files = {"default": folder / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    found = {name: (str(file), _text(file)) for name, file in files.items() if file.is_file()}
    for name in ("tokenizer_config.json", "chat_template.json"):
        if found or not (folder / name).is_file():
            continue
        found = {
            called: (f"{folder / name}, {called!r}" if called != "default" else str(folder / name), text)
            for called, text in _named(folder / name).items()
        }
    return found


def _named(file: Path) -> dict[str, str]:
    """The templates in a file of JSON: one, or a list with names."""
    told = read_json(file).get("chat_template")
    if told is None or isinstance(told, str):
        return {"default": told} if told is not None else {}
    if isinstance(told, dict):
        told = [{"name": name, "template": text} for name, text in told.items()]
    try:
        found = {template["name"]: template["template"] for template in told}
    except (TypeError, KeyError):
        found = {}
    if not found or not all(isinstance(text, str) for text in (*found, *found.values())):
        raise ValueError(f"{file}: chat_template must be a text, or a list of a `name` and a `template` each")
    return found


def _text(file: Path) -> str:
    try:
        if is_lfs_pointer(file):
            raise ValueError(f"{file} is a pointer of Git LFS, not the file; run `git lfs pull` in {file.parent}")
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{file} cannot be read ({error.strerror}); {_OTHER_WORKS}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{file} is not text in UTF-8; {_OTHER_WORKS}") from None


def _special_tokens(folder: Path | None) -> dict[str, str]:
    """Such as `bos_token`: templates name them."""
    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if folder is not None and (folder / name).is_file():
            for token, value in read_json(folder / name).items():
                text = value.get("content") if isinstance(value, dict) else value
                if token.endswith("_token") and isinstance(text, str):
                    found[token] = text
    return found
