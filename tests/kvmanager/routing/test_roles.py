"""Who prefills and who decodes: assigned once, kept, replaced in place, and never in anybody's way."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmanager.routing.cost import RoutingState
from kvmanager.routing.mirror import TierHits
from kvmanager.routing.roles import RoleBook, RoleShares, fit_for, in_use


def book(prefill, decode, *replicas):
    made = RoleBook(RoleShares(prefill, decode))
    for replica in replicas:
        made.join(replica)
    return made


class TestRoleBook:
    def test_the_shares_are_filled_evenly_as_replicas_come(self):
        made = book(2, 4)
        held = [Counter(made.roles.values()) for _ in range(6) if made.join(f"r{len(made.roles)}")]
        assert held[-1] == {"prefill": 2, "decode": 4}
        assert held[1] == {"prefill": 1, "decode": 1}, "two replicas of six serve both phases"

    def test_a_replica_keeps_its_role_however_often_it_registers(self):
        made = book(1, 1, "a", "b")
        before = made.roles
        for replica in ("b", "a", "b"):
            assert made.join(replica) == before[replica]
        assert made.roles == before

    def test_a_replica_that_goes_is_replaced_in_its_role(self):
        for gone in "abc":
            made = book(1, 2, "a", "b", "c")
            role = made.roles[gone]
            made.leave(gone)
            assert made.join("new") == role

    def test_a_successor_that_comes_first_waits_without_a_role(self):
        made = book(1, 1, "a", "b")
        role = made.roles["a"]
        assert made.join("successor") == ""
        assert made.roles.keys() == {"a", "b"}
        made.leave("a")
        assert made.roles["successor"] == role

    def test_one_that_waited_and_went_gets_nothing(self):
        made = book(1, 1, "a", "b", "waiting")
        made.leave("waiting")
        made.leave("a")
        assert made.roles.keys() == {"b"}

    @pytest.mark.parametrize("shares", [RoleShares(), RoleShares(2, 0), RoleShares(0, 2)])
    def test_without_shares_of_both_there_are_no_roles(self, shares):
        made = RoleBook(shares)
        assert made.join("a") == ""
        assert made.roles == {}

    @given(st.integers(1, 4), st.integers(1, 4), st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=60))
    def test_whoever_comes_and_goes_no_share_is_exceeded_and_none_is_left_empty_needlessly(
        self, prefill, decode, moves
    ):
        made, there = book(prefill, decode), set()
        for comes, number in moves:
            replica = f"r{number}"
            if comes:
                made.join(replica)
                there.add(replica)
            else:
                made.leave(replica)
                there.discard(replica)
            held = Counter(made.roles.values())
            assert made.roles.keys() <= there
            assert held["prefill"] <= prefill
            assert held["decode"] <= decode
            assert sum(held.values()) == min(len(there), prefill + decode)


ROLES = {"a": "prefill", "b": "decode", "c": "decode"}


class TestFilter:
    def test_a_phase_goes_to_its_role_only_and_no_phase_to_all(self):
        assert fit_for("abc", "prefill", ROLES) == ["a"]
        assert fit_for("abc", "decode", ROLES) == ["b", "c"]
        assert fit_for("abc", "", ROLES) == ["a", "b", "c"]

    def test_an_empty_role_falls_back_to_all(self):
        assert fit_for("bc", "prefill", ROLES) == ["b", "c"]
        assert fit_for("a", "decode", ROLES) == ["a"]

    def test_a_replica_without_a_role_does_both(self):
        assert fit_for("abd", "prefill", ROLES) == ["a", "d"]
        assert fit_for("abd", "decode", ROLES) == ["b", "d"]
        assert fit_for("abc", "decode", {}) == ["a", "b", "c"]

    def test_roles_are_in_use_where_both_are_held(self):
        assert in_use("ab", ROLES)
        assert not in_use("bc", ROLES)
        assert not in_use("ad", ROLES)
        assert not in_use("ab", {})


class TestCost:
    def state(self):
        made = RoutingState(block_size=32)
        made.route("decoding", "a", 0, 500, 0.0)
        made.route("computing", "b", 400, 20, 0.0)
        return made

    def test_a_prefill_waits_for_prefills_and_not_for_decodes(self):
        made = self.state()
        assert made.rank("ba", {}, 1000, 0.0, "prefill") == ["a", "b"]
        assert made.rank("ab", {}, 1000, 0.0, "decode") == ["b", "a"]
        assert made.rank("ab", {}, 1000, 0.0) == ["b", "a"]

    def test_what_is_decoded_goes_to_the_fewest_blocks_before_it_goes_to_the_longest_prefix(self):
        made = RoutingState(block_size=32)
        made.route("decoding", "a", 0, 500, 0.0)
        hits = {"a": TierHits(4, 0, 0), "b": TierHits(0, 0, 0)}
        assert made.rank("ab", hits, 200, 0.0) == ["a", "b"], "without roles it stays with its prefix"
        assert made.rank("ab", hits, 200, 0.0, "decode") == ["b", "a"]
