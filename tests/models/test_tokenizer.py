"""Every string is representable; known words are one token."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from models.training import lexicon, phrasing
from models.training.tokenizer import SPECIAL_TOKENS, build_tokenizer

TOKENIZER = build_tokenizer()


def test_the_committed_tokenizer_is_the_one_the_word_lists_give(demo_tokenizer: PreTrainedTokenizerFast) -> None:
    assert demo_tokenizer.get_vocab() == TOKENIZER.get_vocab()
    assert demo_tokenizer.chat_template == TOKENIZER.chat_template


def test_vocabulary_stays_small() -> None:
    assert len(TOKENIZER) <= 2_000


@given(st.text())
def test_decoding_gives_back_any_text(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text, add_special_tokens=False)) == text


@pytest.mark.parametrize(
    "text", ["Zürich", "北京在哪里", "🙂 ok", "Anna's\n\n  two  spaces ", "<b>don't</b>\t1,234", " Anna .", "a\r\nb"]
)
def test_decoding_gives_back_unusual_text(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text, add_special_tokens=False)) == text


@pytest.mark.parametrize("word", sorted(lexicon.value_words()))
def test_a_value_is_one_token(word: str) -> None:
    assert len(TOKENIZER.encode(f" {word}", add_special_tokens=False)) == 1


def test_every_phrase_is_in_the_vocabulary() -> None:
    byte_ids = {index for token, index in TOKENIZER.get_vocab().items() if len(token) == 1 and token.isalpha()}
    for phrase in filter(None, phrasing.all_phrases()):
        filled = " " + phrase.strip().format(name="Anna", value="Paris", color="red", object="ball")
        assert not byte_ids & set(TOKENIZER.encode(filled, add_special_tokens=False)), filled


def test_special_tokens_are_single_ids_and_skipped_in_decoding() -> None:
    for token in SPECIAL_TOKENS:
        assert len(TOKENIZER.encode(token, add_special_tokens=False)) == 1
    ids = TOKENIZER.encode("<|bos|> Anna<|end|>", add_special_tokens=False)
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == " Anna"


def test_greeting_replies_differ_at_once_and_fill_a_block_of_32_tokens() -> None:
    replies = [TOKENIZER.encode(reply, add_special_tokens=False) for reply in phrasing.GREETING_REPLIES]
    assert len({reply[0] for reply in replies}) == len(replies) >= 4
    assert all(len(reply) >= 40 for reply in replies)
