"""A template that computes for ever, or takes all memory, ends with a sentence where others end with a prompt."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.checks import template_trial
from app.checks.before_start import require_startable
from app.checks.template_trial import Refusal, Trial, refusal, tried
from configs.settings import SettingsError, load_settings
from tests.model_files import TEMPLATE, write_model

LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
ENDLESS = {
    "always": LOOP,
    "in native code": "{{ 10 ** (10 ** 10) }}",
    "for a system prompt": "{% if messages[0].role == 'system' %}" + LOOP + "{% endif %}" + TEMPLATE,
    "for a second turn": "{% if messages[1] %}" + LOOP + "{% endif %}" + TEMPLATE,
}
LARGE = {"always": "{{ 'x' * 10 ** 11 }}", "in parts": "{{ (['x' * (10 ** 6 * messages | length)] * 5000) | join }}"}


def trial(template: str, **others: str) -> Trial:
    return Trial((("default", template), *others.items()), (("bos_token", "<s>"),))


@pytest.fixture(autouse=True)
def untried(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test tries has not been tried before, and has less time."""
    tried.cache_clear()
    monkeypatch.setattr(template_trial, "MOST_S", 0.5)


@pytest.mark.parametrize("template", ENDLESS.values(), ids=ENDLESS)
def test_a_template_that_comes_to_no_end_is_refused(template: str) -> None:
    assert tried(trial(template)) == Refusal("default", "comes to no end within 0.5 s")


@pytest.mark.parametrize("template", LARGE.values(), ids=LARGE)
def test_a_template_that_takes_all_memory_is_refused(template: str) -> None:
    assert tried(trial(template)) == Refusal("default", "takes too much memory")


def test_of_several_templates_the_one_without_an_end_is_named() -> None:
    assert tried(trial(TEMPLATE, tool_use="{{ 10 ** (10 ** 10) }}")) == Refusal(
        "tool_use", "comes to no end within 0.5 s"
    )


@pytest.mark.parametrize(
    "template", [TEMPLATE, "{{ messages[0].text.more }}", "{% bad", "{{ bos_token + messages[0].content }}"]
)
def test_the_process_finds_what_this_one_finds(template: str) -> None:
    assert tried(trial(template)) == refusal(trial(template))


def test_a_shell_that_makes_pythons_warnings_errors_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "PYTHONWARNINGS": "error",
        "PYTHONPATH": "/nonexistent",
        "PYTHONUTF8": "0",
        "LC_ALL": "C",
    }.items():
        monkeypatch.setenv(name, value)
    assert tried(trial("{{ messages[0].content }} ünïcode 🙂 \ud800")) is None


def test_what_ends_the_process_is_no_prompt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(template_trial, "_ROOT", tmp_path)
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__init__.py").write_text("import os; os._exit(7)")
    assert tried(trial(TEMPLATE)) == Refusal("default", "ends the Python that tries it (exit code 7)")


def test_a_start_ends_with_its_sentence(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    (folder / "chat_template.jinja").write_text(LOOP)
    with pytest.raises(
        SettingsError, match=r"^chat_template: .*jinja comes to no end within 0\.5 s; set chat_template to"
    ):
        require_startable(load_settings({"model": str(folder)}))
