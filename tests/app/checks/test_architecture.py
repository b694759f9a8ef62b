"""A model that answers no chats is refused before anything starts; one that may is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.checks.architecture import check_architecture
from configs.settings import SettingsError
from tests.model_files import write_json, write_model


def folder(tmp_path: Path, architecture: str, **config: Any) -> Path:
    return write_model(tmp_path / "model", architectures=[architecture], **config)


@pytest.mark.parametrize(
    ("architecture", "does"),
    [
        ("BertModel", "embeds"),
        ("RobertaForMaskedLM", "embeds"),
        ("Qwen2ForSequenceClassification", "classifies texts"),
        ("LlamaForSequenceClassification", "classifies texts"),
        ("BertForTokenClassification", "classifies tokens"),
        ("Qwen2ForRewardModel", "rates"),
        ("NomicBertModel", "embeds"),
        ("Eagle3LlamaForCausalLM", "drafts tokens"),
        ("WhisperForConditionalGeneration", "transcribes"),
        ("XForSequenceClassification", "classifies texts"),
        ("DistilBertForQuestionAnswering", "marks answers"),
    ],
)
def test_a_model_that_does_something_else_is_told_what_it_does(tmp_path: Path, architecture: str, does: str) -> None:
    with pytest.raises(SettingsError, match=rf"{architecture}, which {does}.*answers no chats; use one") as refused:
        check_architecture(folder(tmp_path, architecture), {})
    assert len(str(refused.value)) <= 400


@pytest.mark.parametrize(
    "architecture",
    ["LlamaForCausalLM", "Qwen3ForCausalLM", "GPT2LMHeadModel", "Qwen2VLForConditionalGeneration", "OlmoForCausalLM"],
)
def test_a_model_that_generates_passes(tmp_path: Path, architecture: str) -> None:
    assert architecture in check_architecture(folder(tmp_path, architecture), {})


def test_an_architecture_that_vllm_does_not_list_is_left_to_it(tmp_path: Path) -> None:
    check_architecture(folder(tmp_path, "BrandNewForCausalLM"), {})


def test_an_encoder_with_a_decoder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="an encoder with a decoder"):
        check_architecture(folder(tmp_path, "T5ForConditionalGeneration", is_encoder_decoder=True), {})


@pytest.mark.parametrize("architectures", [None, [], "LlamaForCausalLM", [7]])
def test_a_config_that_names_no_architecture_is_refused(tmp_path: Path, architectures: Any) -> None:
    with pytest.raises(SettingsError, match="names no `architectures`"):
        check_architecture(write_model(tmp_path / "model", architectures=architectures), {})


def test_a_sentence_transformers_folder_is_refused_though_its_model_could_generate(tmp_path: Path) -> None:
    model = folder(tmp_path, "Qwen3ForCausalLM")
    write_json(model / "modules.json", [{"idx": 1, "path": "1", "type": "sentence_transformers.models.Pooling"}])
    with pytest.raises(SettingsError, match=r"modules\.json"):
        check_architecture(model, {})
    check_architecture(model, {"runner": "generate"})
    for harmless in ([], {}, [7], [{"type": "sentence_transformers.models.Transformer"}]):
        write_json(model / "modules.json", harmless)
        check_architecture(model, {})


def test_what_overrides_the_config_is_not_judged(tmp_path: Path) -> None:
    check_architecture(folder(tmp_path, "BertModel"), {"hf_overrides": {"architectures": ["LlamaForCausalLM"]}})
