"""What a replica answers to a manager that has died ends no order of the next one."""

from __future__ import annotations

import asyncio

from deployments.manager.directive_sender import DirectiveSender
from deployments.manager.replica_state import ReplicaState
from kvmanager.config import ManagerConfig
from kvmanager.manager import KVManager
from kvmanager.moves.directives import DirectiveResult, Outcome


def test_an_answer_to_an_old_clear_ends_no_clear_that_was_not_carried_out_yet() -> None:
    async def ordered(epoch: int) -> tuple[DirectiveSender, asyncio.Task[int | None], int]:
        state = ReplicaState(0, "node", 0.0)
        sender = DirectiveSender(KVManager(ManagerConfig(1), epoch), {"replica": state})
        clear = asyncio.create_task(sender.clear_device("replica", None, 10.0))
        return sender, clear, (await state.directives.get()).number

    async def main() -> None:
        _, lost, old_id = await ordered(1)
        sender, clear, new_id = await ordered(2)
        sender.acknowledge(old_id, DirectiveResult(Outcome.DONE, blocks=100))
        await asyncio.sleep(0)
        assert not clear.done()
        sender.acknowledge(new_id, DirectiveResult(Outcome.DONE, blocks=3))
        assert await clear == 3
        lost.cancel()

    asyncio.run(main())
