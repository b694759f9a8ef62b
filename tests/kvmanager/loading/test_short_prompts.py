from kvmanager.loading.short_prompts import ASK_EVERY, TRUST_S, RepeatedBlocks, ShortPrompts


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


def named(text):
    return [letter.encode() for letter in text]


def test_what_two_prompts_begin_with_is_saved_when_it_comes_again_and_not_each_time():
    repeated = RepeatedBlocks()
    dues = [repeated.met(named(f"st{number}")) for number in "abcdefgh"]
    assert dues == [0, 2, 0, 2, 0, 0, 0, 2], "the second, the fourth and the eighth time"


def test_a_prompt_that_comes_again_is_saved_whole():
    repeated = RepeatedBlocks()
    for prompt in ("sab", "sac"):
        repeated.met(named(prompt))
    assert repeated.met(named("sab")) == 3


def test_of_prompts_that_nobody_repeats_few_are_remembered():
    repeated = RepeatedBlocks(most=3)
    for prompt in ("ab", "cd", "ef"):
        assert repeated.met(named(prompt)) == 0
    assert repeated.met(named("ab")) == 0, "forgotten"
    assert repeated.met(named("f")) == 1
    assert len(repeated._uses) == 3
