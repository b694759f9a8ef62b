"""The process in which structured-output constraints are tried: compiled as a replica's engine will compile them.

A thread that compiles a grammar cannot be ended, and a native compiler may end its whole process. So the ingress starts
a process that runs `main` (`app.openai.constraint_pool`). It loads vLLM and the tokenizer once and forks a child for
each constraint. The child has a memory limit, and the kernel ends it when its time is over. No threads exist when it
forks.

Messages, pickled: in, `GrammarTrial`; out, once `READY`, then `GrammarVerdict`s in any order. It ends with its pipe.

Leans on vLLM: `SamplingParams.verify`, and `StructuredOutputManager.grammar_init`, which the engine calls for a
`Request` and which leaves a grammar, or its exception, in `request.structured_output_request.grammar`.
"""

from __future__ import annotations

import gc
import logging
import os
import pickle
import random
import resource
import signal
import time
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from app.metrics.labels import FITS, REFUSED, TOO_LARGE, TOO_LONG, TOO_SLOW

logger = logging.getLogger(__name__)

READY = "ready"
STEPS_TRIED = 64
MOST_STEP_S = 0.02
"""Seconds of one processor that a constraint may cost per token; it is the engine's own thread, and others wait."""
MOST_MEMORY_BYTES = 2 << 30
"""Address space that a trial may take in addition to what the process has when it starts."""


class GrammarTrial(NamedTuple):
    """A constraint to be compiled within `timeout_s` seconds of real time."""

    number: int
    constraint: Any
    timeout_s: float


class GrammarVerdict(NamedTuple):
    """`FITS`; `REFUSED`, and vLLM's sentence; or that it took too much time or memory, or would at each token."""

    number: int
    outcome: str
    message: str = ""


def main(descriptor: int) -> None:
    """Serve trials on this end of a pipe until its other end is closed."""
    parent = Connection(descriptor)
    vllm_config = pickle.loads(parent.recv_bytes())
    try_it = _compiler(vllm_config)
    gc.freeze()  # children then share these pages for longer
    parent.send(READY)
    children: dict[Connection, tuple[int, int]] = {}  # its pipe -> its process id, the trial's number
    while True:
        for ready in wait([parent, *children]):
            if ready is parent:
                try:
                    trial = parent.recv()
                except EOFError:
                    _end(children)
                    return
                pipe, pid = _fork(trial, try_it)
                children[pipe] = (pid, trial.number)
            else:
                assert isinstance(ready, Connection)
                parent.send(_reap(ready, *children.pop(ready)))


def _compiler(vllm_config: Any) -> Any:
    """What raises vLLM's error for a constraint that cannot be compiled."""
    from vllm.sampling_params import SamplingParams
    from vllm.tokenizers import cached_tokenizer_from_config
    from vllm.v1.request import Request
    from vllm.v1.structured_output import StructuredOutputManager

    from deployments.engine.grammars.by_tenant import keep_grammars_apart

    tokenizer = cached_tokenizer_from_config(model_config=vllm_config.model_config)

    def compile_it(constraint: Any) -> None:
        params = SamplingParams(structured_outputs=constraint)
        params.verify(
            vllm_config.model_config,
            vllm_config.speculative_config,
            vllm_config.structured_outputs_config,
            tokenizer,
        )
        request = Request("trial", [1], params, None)
        manager = StructuredOutputManager(vllm_config)
        keep_grammars_apart(manager)
        manager.grammar_init(request)
        assert request.structured_output_request is not None
        compiling: Any = request.structured_output_request._grammar
        grammar = compiling.result()
        assert manager.backend is not None
        _follow(grammar, manager.backend.allocate_token_bitmask(1), vllm_config.model_config.get_vocab_size())

    return compile_it


class SlowGrammarError(Exception):
    """Finding the tokens that may come next is so slow that it would hold up every request of the engine's step."""


def _follow(grammar: Any, bitmask: Any, vocab_size: int) -> None:
    """Go where a grammar leads for some tokens, as the engine will at each step, and see what a step costs.

    In processor time, so that a busy machine refuses nothing. Raises SlowGrammarError.
    """
    choice = random.Random(0)
    words = bitmask.numpy()[0].view(np.uint8)
    spent = 0.0
    for number in range(1, STEPS_TRIED + 1):
        began = time.thread_time()
        grammar.fill_bitmask(bitmask, 0)
        allowed = np.flatnonzero(np.unpackbits(words, bitorder="little")[:vocab_size])
        if not len(allowed) or not grammar.accept_tokens("trial", [int(choice.choice(allowed))]):
            return
        spent += time.thread_time() - began
        if spent > MOST_STEP_S * max(number, STEPS_TRIED // 4):
            raise SlowGrammarError
        if grammar.is_terminated():
            return


def _fork(trial: GrammarTrial, try_it: Any) -> tuple[Connection, int]:
    ours, theirs = Pipe(duplex=False)
    pid = os.fork()
    if pid:
        theirs.close()
        return ours, pid
    try:
        signal.setitimer(signal.ITIMER_REAL, trial.timeout_s)  # unhandled, SIGALRM ends the process in native code too
        _limit_memory()
        theirs.send(_try(trial, try_it))
    finally:
        os._exit(0)


def _limit_memory() -> None:
    now = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MOST_MEMORY_BYTES, now + MOST_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _try(trial: GrammarTrial, try_it: Any) -> GrammarVerdict:
    from vllm.exceptions import VLLMClientError

    try:
        try_it(trial.constraint)
    except VLLMClientError as error:
        return GrammarVerdict(trial.number, REFUSED, error.args[0] if error.args else "")
    except SlowGrammarError:
        return GrammarVerdict(trial.number, TOO_SLOW)
    except MemoryError:
        return GrammarVerdict(trial.number, TOO_LARGE)
    except BaseException:  # a panic of a compiler in Rust is no Exception
        logger.info("no grammar can be built for a constraint", exc_info=True)
        return GrammarVerdict(trial.number, REFUSED)
    return GrammarVerdict(trial.number, FITS)


def _reap(pipe: Connection, pid: int, number: int) -> GrammarVerdict:
    """What a child has said; one that said nothing was ended by the clock, or by its own compiler."""
    try:
        verdict = pipe.recv()
    except EOFError:
        verdict = None
    pipe.close()
    _, status = os.waitpid(pid, 0)
    if isinstance(verdict, GrammarVerdict):
        return verdict
    timed_out = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM
    return GrammarVerdict(number, TOO_LONG if timed_out else TOO_LARGE)


def _end(children: dict[Connection, tuple[int, int]]) -> None:
    for pid, _ in children.values():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
