from kvmanager.loading.short_prompts import ASK_EVERY, TRUST_S, ShortPrompts


def test_only_prompts_below_the_last_answer_are_skipped():
    short = ShortPrompts()
    assert not short.skips(0.0, 10)
    short.heard(0.0, 100)
    assert short.skips(1.0, 99)
    assert not short.skips(1.0, 100)
    short.heard(2.0, 0)
    assert not short.skips(3.0, 10)


def test_an_old_answer_is_not_believed():
    short = ShortPrompts()
    short.heard(0.0, 100)
    assert short.skips(TRUST_S, 10)
    assert not short.skips(TRUST_S + 0.1, 10)


def test_now_and_then_a_short_prompt_is_planned_all_the_same():
    short = ShortPrompts()
    short.heard(0.0, 100)
    assert sum(not short.skips(1.0, 10) for _ in range(5 * ASK_EVERY)) == 5
