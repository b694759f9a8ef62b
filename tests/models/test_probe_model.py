"""The committed probe model does what blending is tested with: right after a prefill, wrong from joined KV."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from random import Random

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from models.training.dialogue import encode
from models.training.probe import prompts
from models.training.probe.card import table
from models.training.probe.evaluate import Tally, alone_mask, document_spans, tally
from models.training.probe.train import STEPS, ProbeTrainer, batch, contexts, learning_rate
from models.training.tokenizer import build_tokenizer

WEIGHTS = "43849bf1f1b85e7e3fc578aac71a12370ce117f10a6fd5de8ba1e308013f1025"
LEAST_SHARE, LEAST_GAP = 0.94, 0.30
TOKENIZER = build_tokenizer()


@pytest.fixture(scope="module")
def probe_folder() -> Path:
    return Path(__file__).resolve().parents[2] / "models" / "probe"


@pytest.fixture(scope="module")
def probe_model(probe_folder: Path) -> LlamaForCausalLM:
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(probe_folder, dtype=torch.float32)
    return model.eval()


def test_the_card_states_the_measured_counts_and_they_meet_the_promise(probe_folder: Path) -> None:
    measured = {
        int(context): Tally(**counts)
        for context, counts in json.loads((probe_folder / "measured.json").read_text()).items()
    }
    card = (probe_folder / "README.md").read_text()
    assert table(measured) in card
    assert "license: apache-2.0" in card
    at_512 = measured[512]
    assert at_512.asked >= 120
    assert at_512.full >= LEAST_SHARE * at_512.asked
    assert at_512.full - at_512.alone >= LEAST_GAP * at_512.asked


def test_the_weights_are_those_of_the_card(probe_folder: Path) -> None:
    assert hashlib.sha256((probe_folder / "model.safetensors").read_bytes()).hexdigest() == WEIGHTS


def test_two_hops_are_answered_at_once_and_not_from_documents_read_alone(
    probe_model: LlamaForCausalLM, demo_tokenizer: PreTrainedTokenizerFast
) -> None:
    found = tally(probe_model, demo_tokenizer, 256, 8, seed=77_000)
    assert found.full >= 0.9 * found.asked
    assert found.alone <= 0.6 * found.asked


def test_it_generates_the_answer_through_the_chat_template(
    probe_model: LlamaForCausalLM, demo_tokenizer: PreTrainedTokenizerFast
) -> None:
    homes = "Anna lives in Paris. Anna is a baker. Ben lives in Oslo. Ben has a dog."
    things = "The red ball belongs to Anna. The blue box belongs to Ben."
    ids = demo_tokenizer.apply_chat_template(
        [
            {"role": "system", "content": "Answer from the documents."},
            {"role": "user", "content": "Where is the blue box?"},
        ],
        documents=[{"text": homes}, {"text": things}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=False,
    )
    assert isinstance(ids, torch.Tensor)
    out = probe_model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False)
    assert demo_tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True) == " The blue box city is Oslo."


def test_under_the_mask_a_document_is_read_as_it_is_alone(
    probe_model: LlamaForCausalLM, demo_tokenizer: PreTrainedTokenizerFast
) -> None:
    ids, _ = encode(prompts.heldout_dialogue(3, 128), demo_tokenizer, frozenset())
    spans = document_spans(ids, demo_tokenizer)
    start, stop = spans[-1]
    assert ids[start] == demo_tokenizer.get_vocab()["<|doc|>"]
    with torch.no_grad():
        alone = probe_model(torch.tensor([ids[start:stop]])).logits[0]
        mask = alone_mask(len(ids), spans, torch.float32)
        within = probe_model(torch.tensor([ids]), attention_mask=mask).logits[0, start:stop]
        behind_others = probe_model(torch.tensor([ids])).logits[0, start:stop]
    assert torch.allclose(alone, within, atol=2e-3)
    assert not torch.allclose(alone, behind_others, atol=0.1)


@pytest.mark.parametrize("seed", range(10))
def test_homes_stand_before_things_and_no_answer_twice(seed: int) -> None:
    rng = Random(seed)
    one = prompts.sample(rng, 128, TOKENIZER)
    text = TOKENIZER.decode(one.ids)
    documents, _, answers = text.partition("<|end|>")
    assert documents.rindex("lives in") < documents.index("belongs to")
    stated = [part.rpartition(" is ")[0].rpartition("<|assistant|>")[2] for part in answers.split("<|end|>")]
    stated = [answer for answer in stated if answer.endswith((" city", " owner"))]
    things = [answer.rpartition(" ")[0] for answer in stated]
    assert len(set(things)) == len(things) > 0
    assert len(one.ids) == len(one.weights)


@pytest.mark.parametrize("seed", range(5))
def test_first_hops_point_at_the_full_stop_behind_an_owner_and_at_its_city(seed: int) -> None:
    one = prompts.sample(Random(seed), 128, TOKENIZER)
    text = TOKENIZER.decode(one.ids)
    assert one.hops
    for place, city in one.hops:
        owner, stop = TOKENIZER.convert_ids_to_tokens(one.ids[place - 1 : place + 1])
        assert stop == "."
        assert f"{owner.removeprefix('Ġ')} lives in{TOKENIZER.decode([city])}." in text


def test_a_restarted_run_goes_on_exactly_where_it_stopped(
    tmp_path: Path, demo_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr("models.training.probe.train.TOKENS_PER_STEP", 200)
    first = ProbeTrainer(tmp_path, demo_folder, seed=5)
    first.step()
    first.save()
    uninterrupted = [first.step() for _ in range(2)]
    second = ProbeTrainer(tmp_path, demo_folder, seed=5)
    assert second.state.step == 1
    assert [second.step() for _ in range(2)] == uninterrupted
    assert ProbeTrainer(tmp_path, demo_folder, seed=5, fresh=True).state.step == 0


def test_contexts_grow_rates_fall_and_samples_follow_seed_and_step() -> None:
    assert contexts(0) == (64,)
    assert max(contexts(STEPS - 1)) == 512
    rates = [learning_rate(step) for step in range(STEPS)]
    assert max(rates) > 10 * rates[0] > 0
    assert max(rates) > 10 * rates[-1] > 0
    assert batch(0, 3, TOKENIZER) == batch(0, 3, TOKENIZER) != batch(0, 4, TOKENIZER)
