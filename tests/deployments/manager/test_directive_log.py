"""The manager's last orders: a bounded ring, numbered, with runs of the same order as one entry."""

from __future__ import annotations

from deployments.manager.directive_log import MOST_KEPT, DirectiveLog

CPU, REDIS = ("cpu", "node"), ("redis", "")


def kinds(log: DirectiveLog, seen: int) -> list[tuple[int, str, int, int]]:
    orders, _ = log.since(seen)
    return [(order["number"], order["kind"], order["segments"], order["orders"]) for order in orders]


def test_who_asks_again_is_told_what_is_new() -> None:
    log = DirectiveLog()
    assert log.since(0) == ([], 0)
    log.note("evict", CPU, None, 3)
    log.note("demote", CPU, REDIS, 2)
    assert kinds(log, 0) == [(1, "evict", 3, 1), (2, "demote", 2, 1)]
    assert kinds(log, 1) == [(2, "demote", 2, 1)]
    assert kinds(log, 2) == []


def test_orders_of_one_kind_that_nobody_was_told_of_are_one_and_what_was_told_stays_as_it_was() -> None:
    log = DirectiveLog()
    for _ in range(3):
        log.note("evict", CPU, None, 2)
    log.note("evict", REDIS, None, 1)
    log.note("evict", REDIS, None, 1, "failed (full)")
    assert kinds(log, 0) == [(1, "evict", 6, 3), (2, "evict", 1, 1), (3, "evict", 1, 1)]
    log.note("evict", REDIS, None, 9, "failed (full)")
    assert kinds(log, 3) == [(4, "evict", 9, 1)]
    assert kinds(log, 2) == [(3, "evict", 1, 1), (4, "evict", 9, 1)]


def test_the_oldest_is_dropped_and_counted_and_a_number_of_another_manager_is_no_error() -> None:
    log = DirectiveLog()
    for number in range(MOST_KEPT + 10):
        log.note("evict", CPU, None, 1, outcome=str(number))
    orders, missed = log.since(0)
    assert (len(orders), missed, orders[-1]["number"]) == (MOST_KEPT, 10, log.last)
    assert log.since(log.last + 1000) == ([], 0)
