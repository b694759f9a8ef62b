"""The link between two nodes is cut: streams of the far replica go on at the near one, and no prompt waits for it."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from load_tests.faults.two_nodes import Link, NoNetworkError, run_cut, two_nodes

pytestmark = pytest.mark.server
CUT_S = 40.0
"""Longer than a silent replica is waited for, on a slow machine too."""


@pytest.mark.long(
    "tests/app/backend/test_replica_call.py::"
    "test_a_call_without_outputs_of_a_silent_replica_is_ended_and_one_that_goes_on_is_not"
)
@pytest.mark.long(
    "tests/deployments/router/test_taken_calls.py::"
    "test_a_replica_that_does_not_say_whether_it_takes_a_call_is_not_waited_for"
)
@pytest.mark.timeout(1200)
def test_a_cut_link_breaks_no_stream_and_holds_no_prompt_up(tmp_path: Path) -> None:
    try:
        Link().close()
    except NoNetworkError as error:
        pytest.skip(str(error))
    with two_nodes(tmp_path) as nodes:
        outcome = run_cut(nodes, CUT_S, Random(0))
    assert outcome.right, outcome
    assert max(outcome.silence_s, outcome.slowest_s) < CUT_S, f"something waited for the link: {outcome}"
