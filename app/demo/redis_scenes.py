"""The scenes with Redis: a conversation comes back from it after all other tiers were emptied, and after a restart."""

from __future__ import annotations

from app.demo.report import ReportRow
from app.demo.restart import Restart
from app.demo.stage import Asked, DemoRun

COPY_DEADLINE_S = 30.0
"""KV is copied to Redis in the background; the first scene waits at most this time for the whole conversation."""
CLEAR_DEADLINE_S = 10.0
INDEX_DEADLINE_S = 60.0
"""How long a server that was restarted may take to find in Redis what it had put there."""

_CLEARED = "devices and CPU tier cleared: Redis hit"
_RESTARTED = "whole server restarted: Redis hit"


class RedisScenes:
    """Plays after the other scenes, with the last of their questions."""

    def __init__(self, stage: DemoRun, restart: Restart) -> None:
        self._stage = stage
        self._restart = restart

    def play(self, asked: Asked) -> None:
        """All scenes, in order; one line says why where they cannot be played."""
        redis = (self._stage.server.parts() or {}).get("redis")
        if redis is None or redis["state"] != "ok":
            state = "this server uses none" if redis is None else redis["state"]
            self._stage.report.add(ReportRow("Redis hit, restart", notes=(f"left out: Redis: {state}",), skipped=True))
            return
        self._from_redis(asked)
        self._promoted(asked)
        self._after_restart(asked)

    def _from_redis(self, asked: Asked) -> None:
        stage = self._stage
        problems = stage.wait_until_saved()
        stage.report.doing(f"{_CLEARED}: waiting until Redis has the whole conversation")
        problems += self._wait_until_in_redis(asked, COPY_DEADLINE_S)
        stage.known.copied_to_redis(asked.turn.computed)
        stage.report.doing(_CLEARED)
        stage.clear("device", "cpu")
        if not stage.server.wait_until_none_in("cpu", asked.turn.computed, CLEAR_DEADLINE_S):
            problems.append(f"the CPU tier is not empty {CLEAR_DEADLINE_S:.0f} s after it was cleared")
        turn = stage.ask(asked.chat, stage.here)
        stage.check(_CLEARED, asked.question, stage.here, turn, problems)

    def _promoted(self, asked: Asked) -> None:
        """What came from Redis lies in the CPU tier since, for all replicas."""
        stage = self._stage
        scene = f"{'devices cleared' if stage.is_alone else 'another replica'}: promoted to the CPU tier"
        stage.saved_turn(scene, asked.question, asked.chat, stage.there, clear=stage.is_alone)

    def _after_restart(self, asked: Asked) -> None:
        stage = self._stage
        if self._restart.unavailable:
            note = f"left out: {self._restart.unavailable}"
            stage.report.add(ReportRow(_RESTARTED, notes=(note,), skipped=True))
            return
        stage.report.doing("waiting until Redis has the whole conversation")
        problems = stage.wait_until_saved() + self._wait_until_in_redis(asked, COPY_DEADLINE_S)
        problem = self._restart.run(stage.report.doing)
        if problem:
            stage.report.add(ReportRow(_RESTARTED, problems=(*problems, problem)))
            return
        stage.known.clear("device", "cpu")
        stage.report.doing("waiting until the index of Redis is rebuilt")
        problems += self._wait_until_in_redis(asked, INDEX_DEADLINE_S)
        stage.report.doing(_RESTARTED)
        turn = stage.ask(asked.chat, stage.here)
        note = f"every process ended and started again, {self._restart.took_s:.0f} s"
        stage.check(_RESTARTED, asked.question, stage.here, turn, problems, notes=[note])

    def _wait_until_in_redis(self, asked: Asked, deadline_s: float) -> list[str]:
        """The problem when Redis has not got all in time, or nothing."""
        if self._stage.server.wait_until_in("redis", asked.turn.computed, deadline_s):
            return []
        return [f"the conversation is not whole in Redis after {deadline_s:.0f} s (is kv.redis_min_uses above 1?)"]
