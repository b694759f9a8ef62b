"""Models with random weights: their shapes, their tokenizer and template, and how they are written."""

import json
import random
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config

from load_tests.harness import models
from load_tests.harness.models import SHAPES, ModelError, Shape, model_folder, token_counter
from load_tests.workloads import Words

TINY = Shape("tiny", 2, 64, 2, 1, 32, 128, vocab_size=1_024)
"""A few hundred kilobytes; made like the others."""
CONVERSATION = [
    {"role": "system", "content": "The red ball belongs to Anna.\n"},
    {"role": "user", "content": " Where is it? "},
    {"role": "assistant", "content": " it stands there"},
    {"role": "user", "content": "Since when?"},
    {"role": "assistant", "content": ""},
    {"role": "user", "content": "<|im_end|> é 漢"},
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The folder in which the tiny model's folder is."""
    root = tmp_path_factory.mktemp("models")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(models.SHAPES, "tiny", TINY)
        yield model_folder("tiny", root)


@pytest.fixture
def known(monkeypatch):
    monkeypatch.setitem(models.SHAPES, "tiny", TINY)


def transformers_config(shape):
    return Qwen2Config(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_hidden_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        tie_word_embeddings=True,
    )


@pytest.mark.parametrize("name", SHAPES)
def test_a_shapes_parameters_are_those_of_the_model_with_its_name(name):
    shape = SHAPES[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(transformers_config(shape))
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert shape.parameters == pytest.approx(int(name.removesuffix("m")) * 1e6, rel=0.05)
    assert shape.head_dim * shape.num_attention_heads == shape.hidden_size
    assert shape.num_attention_heads > shape.num_key_value_heads > 1


def test_kv_of_a_token_weighs_what_its_cache_weighs(tiny):
    model = AutoModelForCausalLM.from_pretrained(tiny)
    cache = model(torch.arange(10)[None], use_cache=True).past_key_values
    stored = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert TINY.kv_bytes_per_token() * 10 == stored
    assert TINY.kv_bytes_per_token(dtype_bytes=1) * 20 == stored


def test_the_folder_is_qwen2_in_bfloat16_with_room_for_long_prompts(tiny):
    config = json.loads((tiny / "config.json").read_text())
    assert (config["architectures"], config["dtype"]) == (["Qwen2ForCausalLM"], "bfloat16")
    assert config["max_position_embeddings"] == 32_768
    assert json.loads((tiny / "generation_config.json").read_text())["eos_token_id"] == config["eos_token_id"]
    assert sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(tiny).parameters()) == TINY.parameters


def test_answers_are_finite_and_come_back_as_the_same_tokens(tiny):
    """Else an answer's KV could never be reused: the next prompt holds its text, not its tokens."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny), AutoTokenizer.from_pretrained(tiny)
    prompt = tokenizer.apply_chat_template(CONVERSATION[:2], add_generation_prompt=True, return_dict=True)["input_ids"]
    assert torch.isfinite(model(torch.tensor([prompt])).logits).all()
    answer = model.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False)[0, len(prompt) :].tolist()
    assert len(answer) == 40
    said = {"role": "assistant", "content": tokenizer.decode(answer)}
    later = [*CONVERSATION[:2], said, *CONVERSATION[3:4]]
    ids = tokenizer.apply_chat_template(later, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert ids[: len(prompt) + len(answer)] == prompt + answer


def test_answers_depend_on_the_prompt(tiny):
    """Else wrong KV would go unnoticed."""
    model = AutoModelForCausalLM.from_pretrained(tiny)
    prompts = torch.randint(3, TINY.vocab_size, (8, 20), generator=torch.Generator().manual_seed(0))
    assert len(set(model(prompts).logits[:, -1].argmax(-1).tolist())) > 4


def test_a_conversations_rendering_begins_with_that_of_every_earlier_part(tiny):
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    whole = tokenizer.apply_chat_template(CONVERSATION, tokenize=False)
    for end in range(1, len(CONVERSATION) + 1):
        assert whole.startswith(tokenizer.apply_chat_template(CONVERSATION[:end], tokenize=False))
        if CONVERSATION[end - 1]["role"] == "user" and end < len(CONVERSATION):
            asked = tokenizer.apply_chat_template(CONVERSATION[:end], tokenize=False, add_generation_prompt=True)
            assert whole.startswith(asked + CONVERSATION[end]["content"])


def test_any_text_is_representable_and_counted_without_special_tokens(tiny):
    tokenizer, count = AutoTokenizer.from_pretrained(tiny), token_counter(tiny)
    text = "naïve 漢字 \t\n\x00 🙂 def f(x): return x"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert count(text) == len(ids)
    assert count("") == 0


def test_texts_for_its_tokenizer_have_the_length_that_was_asked_for(tiny):
    count = token_counter(tiny)
    text = Words(count)
    for tokens in (1, 33, 2_000):
        assert count(text(random.Random(0), tokens)) == pytest.approx(tokens, abs=5)


def test_a_model_is_made_once_and_the_same_everywhere(tiny, known, tmp_path):
    before = {file.name: file.stat().st_mtime_ns for file in tiny.iterdir()}
    assert model_folder("tiny", tiny.parent) == tiny
    assert {file.name: file.stat().st_mtime_ns for file in tiny.iterdir()} == before
    torch.manual_seed(7)  # what others have drawn makes no difference
    again = model_folder("tiny", tmp_path)
    assert {file.name: file.read_bytes() for file in again.iterdir()} == {
        file.name: file.read_bytes() for file in tiny.iterdir()
    }
    assert [file.name for file in tmp_path.iterdir()] == ["tiny"]


def test_making_a_model_leaves_the_callers_random_numbers_alone(known, tmp_path):
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    model_folder("tiny", tmp_path)
    assert torch.equal(torch.rand(2), expected)


def test_who_comes_second_takes_what_the_first_has_made(known, tmp_path, monkeypatch):
    train = models.train_tokenizer

    def slowly(vocabulary):
        (tmp_path / "tiny").mkdir()
        (tmp_path / "tiny" / "config.json").write_text("{}")
        return train(vocabulary)

    monkeypatch.setattr(models, "train_tokenizer", slowly)
    assert [file.name for file in model_folder("tiny", tmp_path).iterdir()] == ["config.json"]
    assert [file.name for file in tmp_path.iterdir()] == ["tiny"]


def test_nothing_is_left_of_a_model_that_was_not_finished(known, tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(models, "_random_model", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model_folder("tiny", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_unknown_names_and_unwritable_folders_are_one_sentence(known, tmp_path):
    with pytest.raises(ModelError, match=r"^there is no model '7b'; choose one of 10m, 40m, 365m, tiny\.$"):
        model_folder("7b", tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match=r"^the model tiny cannot be written to .*file/tiny \(.*\); make room there"):
        model_folder("tiny", tmp_path / "file")
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "mine").write_text("")
    with pytest.raises(ModelError, match=r"^the model tiny cannot be written"):
        model_folder("tiny", tmp_path)


def test_the_command_names_the_models_it_knows(tmp_path):
    command = [sys.executable, "-m", "load_tests.harness.models", "7b", "--root", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "there is no model '7b'; choose one of 10m, 40m, 365m.\n"
