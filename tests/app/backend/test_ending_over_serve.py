"""A replica that a real Serve stops knows it while its requests go on: those that have no end of their own can end."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest
from ray import cloudpickle, serve

from app.backend.serve import is_ending
from load_tests.harness.patience import patience, until

pytestmark = pytest.mark.server
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Ray's workers cannot import a test

APP = "ending"


class Watched:
    """Its one request lasts until the replica is being stopped."""

    async def watch(self) -> bool:
        from app.backend.serve import is_ending

        self._began = True
        while not is_ending():  # noqa: ASYNC110 (it is asked, as the feed asks it)
            await asyncio.sleep(0.05)
        return True

    def state(self) -> tuple[bool, bool]:
        from app.backend.serve import is_ending

        return getattr(self, "_began", False), is_ending()


def test_a_stop_is_known_before_the_last_request_has_ended(serve_port: int) -> None:
    deployment: Any = serve.deployment(
        Watched, ray_actor_options={"num_cpus": 0}, graceful_shutdown_wait_loop_s=0.1, graceful_shutdown_timeout_s=600
    )
    handle = serve.run(deployment.bind(), name=APP, route_prefix=None)
    watching = handle.watch.remote()
    until(lambda: handle.state.remote().result() == (True, False), "it is watched", 60)
    serve.delete(APP, _blocking=False)
    assert watching.result(timeout_s=patience(60))
    serve.delete(APP)


def test_a_process_that_is_no_replica_is_not_being_stopped() -> None:
    assert not is_ending()
