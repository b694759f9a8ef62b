"""A policy of the user's, named module:Class: taken, or refused in one sentence."""

import pytest

from kvmanager.eviction.policies import PolicySetting, find_policy, make_policy
from kvmanager.eviction.policies.lru import Lru
from kvmanager.index.hotness import HotnessClock

SETTING = PolicySetting(HotnessClock(10), lambda: 1, 0)


class NotAPolicy:
    pass


class NeedsMore(Lru):
    def __init__(self, setting, more):
        super().__init__(setting)


def test_a_class_on_the_path_is_a_policy_like_any_other():
    assert find_policy("kvmanager.eviction.policies.lru:Lru") is Lru
    assert isinstance(make_policy("kvmanager.eviction.policies.lru:Lru", SETTING), Lru)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nope", "unknown eviction policy 'nope'"),
        ("no_such_module:Class", "cannot be imported"),
        ("kvmanager.eviction.policies.lru:NoSuchClass", "cannot be imported"),
        ("kvmanager.eviction.policies.lru:", "cannot be imported"),
        (f"{__name__}:NotAPolicy", "is no subclass"),
        ("kvmanager.index.eviction_policy:EvictionPolicy", "lacks methods"),
        (f"{__name__}:NeedsMore", "cannot be made"),
    ],
)
def test_what_is_no_policy_is_refused_in_one_sentence(name, says):
    with pytest.raises(ValueError, match=says) as refused:
        make_policy(name, SETTING)
    assert "\n" not in str(refused.value)
