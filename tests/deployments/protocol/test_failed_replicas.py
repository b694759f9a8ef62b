"""For how long a replica that failed a request is remembered."""

from __future__ import annotations

from deployments.protocol.wire import FailedReplicas


def test_failures_are_forgotten_in_time_each_by_itself() -> None:
    now = [0.0]
    failed = FailedReplicas(keep_s=10.0, clock=lambda: now[0])
    for name, at in (("a", 0.0), ("b", 6.0), ("a", 8.0)):
        now[0] = at
        failed.note(name)
    now[0] = 15.9
    assert ("a" in failed, "b" in failed, "c" in failed) == (True, True, False)
    now[0] = 17.0
    assert ("a" in failed, "b" in failed) == (True, False)
    failed.note("c")
    assert set(failed._failed_at) == {"a", "c"}, "it does not grow"
