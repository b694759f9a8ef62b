"""A folder whose files are not whole is refused before anything starts, in a sentence that names the file."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from app.checks.model_files import check_model_files
from configs.model_folder import PROJECT_ROOT, read_config
from configs.settings import SettingsError
from tests.model_files import write_json, write_model, write_weights

LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 4096\n"
SHARD = "model-0000{}-of-00003.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def refusal(folder: Path, **extra_args: Any) -> str:
    """The one sentence, which fits a terminal's few lines."""
    with pytest.raises(SettingsError, match=r"^model: ") as refused:
        check_model_files(folder, extra_args)
    said = str(refused.value)
    assert "\n" not in said
    assert len(said) <= 400
    return said


def shards(folder: Path, *numbers: int) -> None:
    """Put these of three shards in the place of the one file."""
    (folder / "model.safetensors").unlink()
    for number in numbers:
        write_weights(folder / SHARD.format(number))


def index(folder: Path, content: object) -> None:
    write_json(folder / "model.safetensors.index.json", content)


def test_a_whole_folder_passes(folder: Path) -> None:
    assert "files: 1" in check_model_files(folder, {})
    check_model_files(PROJECT_ROOT / "models" / "demo", {})


@pytest.mark.parametrize(
    "name", ["model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json"]
)
def test_a_pointer_of_git_lfs_is_named_with_the_command_that_fetches_the_file(folder: Path, name: str) -> None:
    (folder / name).write_text(LFS)
    said = refusal(folder)
    assert str(folder / name) in said
    assert "git lfs pull" in said


def test_a_pointer_in_the_place_of_config_json_is_named_too(folder: Path) -> None:
    (folder / "config.json").write_text(LFS)
    with pytest.raises(ValueError, match=r"config\.json is a pointer of Git LFS.*git lfs pull"):
        read_config(folder)


def test_a_pointer_that_is_not_loaded_does_no_harm(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_text(LFS)
    (folder / "picture.png").write_text(LFS)
    check_model_files(folder, {})


@pytest.mark.parametrize("kept", [0, 4, 30, -1], ids=["empty", "length", "header", "tensors"])
def test_a_cut_file_is_refused_as_safetensors_would_refuse_it(folder: Path, kept: int) -> None:
    file = folder / "model.safetensors"
    save_file({"weight": torch.zeros(4, 4)}, file)
    check_model_files(folder, {})
    file.write_bytes(file.read_bytes()[:kept])
    assert str(file) in refusal(folder)
    with pytest.raises(Exception, match=r"header|file|Header"), safe_open(file, "pt"):
        pass


@pytest.mark.parametrize(
    "content",
    [
        b"\xff" * 64,
        (2).to_bytes(8, "little") + b"[]",
        (4).to_bytes(8, "little") + b"nope",
        (2).to_bytes(8, "little") + b"{}" + bytes(8),
        (12).to_bytes(8, "little") + b'{"a": {"b":1',
        b"<html>Not found, please log in to see this file</html>",
    ],
)
def test_what_is_no_safetensors_file_is_refused(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    assert "model.safetensors" in refusal(folder)


def test_a_shard_that_the_index_names_and_that_is_not_there_is_named(folder: Path) -> None:
    shards(folder, 1, 3)
    index(folder, {"weight_map": {"a": SHARD.format(1), "b": SHARD.format(2), "c": SHARD.format(3)}})
    assert SHARD.format(2) in refusal(folder)
    write_weights(folder / SHARD.format(2))
    assert "files: 3" in check_model_files(folder, {})


def test_a_missing_shard_is_seen_by_the_others_names_without_an_index(folder: Path) -> None:
    shards(folder, 1, 3)
    assert SHARD.format(2) in refusal(folder)


def test_a_file_that_the_index_does_not_name_is_not_looked_at(folder: Path) -> None:
    index(folder, {"weight_map": {"a": "model.safetensors"}})
    (folder / "old.safetensors").write_bytes(b"")
    check_model_files(folder, {})


@pytest.mark.parametrize("content", [[], {}, {"weight_map": []}, {"weight_map": {"a": 1}}, None])
def test_a_broken_index_is_refused(folder: Path, content: object) -> None:
    index(folder, content)
    assert "index.json" in refusal(folder)


def test_checkpoints_of_pytorch_are_looked_at_where_there_is_nothing_better(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    file = folder / "pytorch_model.bin"
    torch.save({"weight": torch.zeros(64)}, file)
    check_model_files(folder, {})
    file.write_bytes(file.read_bytes()[:-30])
    assert not zipfile.is_zipfile(file)
    assert "is cut" in refusal(folder)
    file.write_bytes(b"")
    assert "is empty" in refusal(folder)
    file.write_text(LFS)
    assert "git lfs pull" in refusal(folder)


def test_a_folder_without_weights_is_refused_unless_they_come_from_elsewhere(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "training_args.bin").write_bytes(b"PK")
    assert "no weights" in refusal(folder)
    assert "tokenizer" in check_model_files(folder, {"load_format": "dummy"})


@pytest.mark.parametrize("content", ["", "{", "null", "[]", '"text"', "\xff"], ids=repr)
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_broken_file_of_the_tokenizer_is_named(folder: Path, name: str, content: str) -> None:
    (folder / name).write_bytes(content.encode("latin-1"))
    assert name in refusal(folder)


def test_a_folder_without_a_tokenizer_is_refused_unless_it_brings_code_for_one(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    assert "no tokenizer" in refusal(folder)
    write_json(folder / "tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["own.Own", None]}})
    check_model_files(folder, {})


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[]", "must hold an object, not a list"),
        ("null", "not None"),
        ("7", "not 7"),
        ("{", "is not JSON"),
        ("\xff", "UTF-8"),
        ("[" * 100_000, "not JSON"),
        (json.dumps({"num_key_value_heads": [4, 2]}), "num_key_value_heads must be a whole number, not a list"),
        (json.dumps({"text_config": {"hidden_size": "64"}}), r"text_config\.hidden_size .* not '64'"),
        (json.dumps({"max_position_embeddings": 0.5}), r"not 0\.5"),
        (json.dumps({"num_hidden_layers": True}), "not True"),
        (json.dumps({"text_config": [1]}), "text_config must be an object"),
    ],
    ids=["list", "null", "number", "cut", "bytes", "deep", "heads", "inner", "half", "bool", "text_config"],
)
def test_a_config_json_that_is_none_is_one_sentence(folder: Path, content: str, says: str) -> None:
    (folder / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=says) as refused:
        read_config(folder)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("config", [{}, {"text_config": None}, {"head_dim": None}, {"max_position_embeddings": 64.0}])
def test_what_config_json_does_not_say_is_no_fault(folder: Path, config: dict[str, Any]) -> None:
    write_json(folder / "config.json", config)
    read_config(folder)


def test_the_library_takes_what_passes_here(folder: Path) -> None:
    with safe_open(folder / "model.safetensors", "pt") as opened:
        assert list(opened.keys()) == ["weight"]
