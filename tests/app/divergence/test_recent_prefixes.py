"""How often the first tokens of a prompt cost its whole prefix, and what they look like."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoTokenizer

from app.divergence.recent_prefixes import REMEMBERED, RecentPrefixes
from app.metrics.labels import BY_BILLING_LINE, BY_DATE, BY_ID, BY_OTHER, BY_TEMPLATE, PARTED, PARTED_DEFECT
from configs.settings import load_settings

SEGMENT = 64
RULES = " The red ball belongs to Anna, who lives in Paris. The blue ball belongs to Ben, who lives in Rome." * 12
OTHER = " A green box stands in the garden, and nobody knows who has put it there. It is closed." * 12


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(load_settings({}).model_source)


class Seen:
    """Heads, and what they counted."""

    def __init__(self, tokenizer: Any, tenants: tuple[str, ...] = ()) -> None:
        self.counted: list[str] = []
        self.tokenizer = tokenizer
        self.prefixes = RecentPrefixes(tenants, SEGMENT, tokenizer, self.counted.append)

    def see(self, text: str, tenant: str = "", salt: str = "salt") -> list[str]:
        """What one more prompt adds."""
        before = len(self.counted)
        self.prefixes.see(tenant, salt, self.tokenizer.encode(text, add_special_tokens=False))
        return self.counted[before:]


SYSTEM = "<|system|>"
LOOKS = [
    (BY_DATE, "Today is 2026-11-24.", "Today is 2026-11-25."),
    (BY_DATE, "It is Monday, 23 November 2026.", "It is Tuesday, 24 November 2026."),
    (BY_DATE, "Now: 10:05:59", "Now: 9:05:59"),
    (BY_DATE, "Cutting Knowledge. Today Date: 26 Jul 2024\n\n", "Cutting Knowledge. Today Date: 3 Aug 2024\n\n"),
    (BY_DATE, "epoch 1764036000.", "epoch 1764036017."),
    (BY_DATE, "", "The time is 12:00.\n"),
    (
        BY_BILLING_LINE,
        "x-anthropic-billing-header: cc_version=2.1.37.0d9; cch=fa690;\nYou are a helper.",
        "x-anthropic-billing-header: cc_version=2.1.37.0d9; cch=00b1c;\nYou are a helper.",
    ),
    (BY_BILLING_LINE, "", "x-anthropic-billing-header: cc_version=2.1.37.0d9; cch=00b1c;\n"),
    (BY_ID, "Session 1f0e7a52-9a77", "Session 8c2b1d90-0000"),
    (BY_ID, "request id: ab", "request id: xy"),
    (BY_TEMPLATE, f"{SYSTEM}You help.<|end|>{SYSTEM}", SYSTEM),
    (BY_OTHER, "You speak to Anna.", "You speak to Benedict."),
]


@pytest.mark.parametrize(("cause", "one", "other"), LOOKS)
def test_what_stands_in_front_is_told_by_its_looks(tokenizer, cause, one, other):
    for first, second in ((one, other), (other, one)):
        seen = Seen(tokenizer)
        assert seen.see(first + RULES) == []
        assert seen.see(second + RULES) == [cause]
        assert seen.prefixes.of("") == {"prompts": 2, "parted": {**dict.fromkeys(PARTED, 0), cause: 1}}


def test_prompts_that_share_their_first_segment_or_nothing_at_all_do_not_count(tokenizer):
    seen = Seen(tokenizer)
    for text in (RULES, RULES + "Where is it?", OTHER, OTHER + "Monday", f"Monday {OTHER[:60]}", "x" * 5000):
        assert seen.see(text) == []
    assert seen.see(RULES) == []
    assert seen.prefixes.of("")["prompts"] == 6, "one is shorter than a segment"


def test_each_prompt_with_a_date_of_its_own_counts_and_one_that_comes_back_does_not(tokenizer):
    seen = Seen(tokenizer)
    dates = [f"2026-11-{day} " for day in range(10, 30)]
    assert [seen.see(date + RULES) for date in dates] == [[], *[[BY_DATE]] * 19]
    assert seen.see(dates[-1] + RULES) == []
    assert seen.see(dates[0] + RULES) == [BY_DATE], f"only {REMEMBERED} are remembered"


def test_what_another_tenant_or_another_salt_has_sent_is_not_compared(tokenizer):
    seen = Seen(tokenizer, ("alice", "bob"))
    assert seen.see("Monday" + RULES, "alice") == []
    assert seen.see("Friday" + RULES, "bob") == []
    assert seen.see("Friday" + RULES, "alice", salt="her own") == []
    assert seen.see("Friday" + RULES, "alice") == [BY_DATE]
    assert (seen.prefixes.of("alice")["prompts"], seen.prefixes.of("bob")["prompts"]) == (3, 1)
    assert sum(seen.prefixes.of("bob")["parted"].values()) == 0


def test_many_tenants_share_a_bounded_memory(tokenizer):
    seen = Seen(tokenizer, tuple(f"tenant-{number}" for number in range(1000)))
    tokens = seen.tokenizer.encode(RULES)
    for number in range(40):
        seen.prefixes.see("tenant-1", "", [100 + number, *tokens])
    assert seen.counted == [BY_OTHER] * 39
    assert sum(len(own) for own in seen.prefixes._prefixes.values()) == 4


def test_tokens_that_no_text_has_are_counted_as_a_defect_at_the_worst(tokenizer, own_records):
    seen = Seen(tokenizer)
    for first in (0, 2**31 - 1, 2**40, 2**41):
        seen.prefixes.see("", "", [first] * SEGMENT + list(range(SEGMENT)))
    assert seen.counted.count(PARTED_DEFECT) == 2
    assert len([one for one in own_records() if one.levelname == "ERROR"]) == 1


def test_hostile_texts_are_looked_at_within_bounds(tokenizer):
    seen = Seen(tokenizer)
    tokens = seen.tokenizer.encode(RULES)
    longest = max(range(len(tokenizer)), key=lambda token: len(tokenizer.decode([token])))
    for number, token in enumerate((longest, *tokenizer.encode("a-1:"))):
        seen.prefixes.see("", "", [number, *[token] * 200, *tokens])
    assert set(seen.counted) <= set(PARTED)
