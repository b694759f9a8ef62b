"""A server whose chats could not be answered is refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from app.checks import chat_template
from app.checks.chat_template import check_chat_template
from app.checks.template_trial import refusal
from configs.settings import SettingsError
from tests.model_files import TEMPLATE, write_json, write_model

BROKEN = {
    "cut": "{% for message in messages %}{{ message.content }}",
    "unknown filter": "{% for message in messages %}{{ message.content | shout }}{% endfor %}",
    "unknown tag": "{% think %}{{ messages[0].content }}",
    "raises": "{{ raise_exception('Only tools may speak') }}",
    "needs more": "{{ messages[1].content }}{{ messages[1].content.text.more }}",
    "makes nothing": "{% if false %}{{ messages }}{% endif %}",
    "empty": "",
}
GOOD = {
    "plain": TEMPLATE,
    "generation": "{% for message in messages %}{% generation %}{{ message.content }}{% endgeneration %}{% endfor %}",
    "lists": "{% for m in messages %}{% for part in m.content %}{{ part['text'] }}{% endfor %}{% endfor %}",
    "only lists": "{% if messages[0].content is string %}{{ raise_exception('no') }}{% endif %}{{ messages[0].role }}",
    "tokens": "{{ bos_token + messages[0].content + eos_token }}",
    "date": "{{ strftime_now('%Y') }}{% for m in messages %}{{ m | tojson(indent=2) }}{% continue %}{% endfor %}",
    "namespace": "{% set ns = namespace(x='') %}{% set ns.x = messages[-1]['content'].strip() %}{{ ns.x }}",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = write_model(tmp_path / "model")
    write_json(model / "tokenizer_config.json", {"bos_token": "<s>", "eos_token": {"content": "</s>"}})
    return model


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """For templates that come to an end: many of them are tried sooner."""
    monkeypatch.setattr(chat_template, "tried", refusal)


def put(folder: Path, where: str, template: str) -> Path:
    """Where a template may stand."""
    if where == "jinja":
        (folder / "chat_template.jinja").write_text(template)
    elif where == "processor":
        write_json(folder / "chat_template.json", {"chat_template": template})
    else:
        named = [{"name": "default", "template": template}, {"name": "tool_use", "template": TEMPLATE}]
        told = {"chat_template": named if where == "list" else template, "bos_token": "<s>", "eos_token": "</s>"}
        write_json(folder / "tokenizer_config.json", told)
    return folder


PLACES = ["jinja", "tokenizer_config", "list", "processor"]


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("template", BROKEN.values(), ids=BROKEN)
def test_a_broken_template_is_refused_wherever_it_stands(folder: Path, where: str, template: str) -> None:
    with pytest.raises(SettingsError, match=r"^chat_template: .*set chat_template to the path") as refused:
        check_chat_template(put(folder, where, template), None, {})
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) <= 400 + len(str(folder))


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("template", GOOD.values(), ids=GOOD)
def test_what_transformers_renders_is_taken(folder: Path, where: str, template: str) -> None:
    check_chat_template(put(folder, where, template), None, {})
    content = [{"type": "text", "text": "Hello!"}] if "part" in template or "is string" in template else "Hello!"
    message = {"role": "user", "content": content}
    render_jinja_template([[message]], chat_template=template, bos_token="<s>", eos_token="</s>")


def test_the_file_that_the_setting_names_takes_the_place_of_the_models_own(folder: Path, tmp_path: Path) -> None:
    put(folder, "jinja", BROKEN["cut"])
    own = tmp_path / "own.jinja"
    own.write_text(TEMPLATE)
    assert str(own) in check_chat_template(folder, str(own), {})
    assert str(own) in check_chat_template(None, str(own), {})
    own.write_text(BROKEN["unknown filter"])
    with pytest.raises(SettingsError, match=r"own\.jinja is no Jinja in line 1 \(No filter named 'shout'"):
        check_chat_template(None, str(own), {})
    own.write_bytes(b"\xff\xfe")
    with pytest.raises(SettingsError, match=r"^chat_template: .*UTF-8"):
        check_chat_template(folder, str(own), {})
    own.write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(SettingsError, match="git lfs pull"):
        check_chat_template(folder, str(own), {})


def test_a_folder_without_a_template_is_refused_in_words_that_name_the_setting(folder: Path) -> None:
    with pytest.raises(SettingsError, match=r"has no chat template.*set chat_template"):
        check_chat_template(folder, None, {})


def test_a_model_that_needs_none_passes_without_one(folder: Path) -> None:
    assert "hub" not in check_chat_template(None, None, {})
    check_chat_template(folder, None, {"tokenizer_mode": "mistral"})
    (folder / "tekken.json").write_text("{}")
    check_chat_template(folder, None, {})


def test_vllms_own_templates_for_some_kinds_of_models_count(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", model_type="deepseek_vl_v2")
    (model / "tokenizer_config.json").unlink()
    assert "vLLM's own" in check_chat_template(model, None, {})


def test_of_several_templates_one_has_to_be_the_default_and_all_have_to_be_jinja(folder: Path) -> None:
    named = folder / "tokenizer_config.json"
    write_json(named, {"chat_template": [{"name": "rag", "template": TEMPLATE}]})
    with pytest.raises(SettingsError, match=r"none is called 'default' \(rag\)"):
        check_chat_template(folder, None, {})
    write_json(named, {"chat_template": [{"name": "default", "template": TEMPLATE}, {"name": "a", "template": "{% x"}]})
    with pytest.raises(SettingsError, match="'a' is no Jinja in line 1"):
        check_chat_template(folder, None, {})
    write_json(named, {})
    (folder / "additional_chat_templates").mkdir()
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ broken")
    with pytest.raises(SettingsError, match=r"tool_use\.jinja is no Jinja in line 1"):
        check_chat_template(folder, None, {})


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("told", [7, [], [7], [{"name": "default"}], {"default": 7}, [{"name": 1, "template": "x"}]])
def test_what_is_no_template_at_all_is_refused(folder: Path, told: object) -> None:
    write_json(folder / "tokenizer_config.json", {"chat_template": told})
    with pytest.raises(SettingsError, match="chat_template must be a text"):
        check_chat_template(folder, None, {})


def test_a_long_sentence_of_a_template_is_cut(folder: Path) -> None:
    put(folder, "jinja", "{{ raise_exception('no ' * 1000) }}")
    with pytest.raises(SettingsError, match="…") as refused:
        check_chat_template(folder, None, {})
    assert len(str(refused.value)) < 400 + len(str(folder))


def test_the_list_of_places_is_that_of_transformers() -> None:
    from transformers.utils import CHAT_TEMPLATE_DIR, CHAT_TEMPLATE_FILE

    assert (CHAT_TEMPLATE_FILE, CHAT_TEMPLATE_DIR) == ("chat_template.jinja", "additional_chat_templates")
    assert chat_template.tables(chat_template._FALLBACKS[0])[chat_template._FALLBACKS[1]]
