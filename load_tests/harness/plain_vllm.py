"""Plain vLLM, without prefix caching and without a connector, as the reference for what an answer should be.

    python -m load_tests.harness.plain_vllm < requests.json > answers.json

reads `{"model", "dtype", "max_model_len", "requests": [{"prompt": [...], "max_tokens": n}]}` and writes
`[{"answer": [...], "logprobs": [...]}]`. A process of its own, because vLLM keeps one engine's state per process.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
_CPU_POOL_BYTES = 1 << 30


def main() -> None:
    """Answer everything on stdin."""
    os.environ.update(_ENVIRONMENT)
    # vLLM and its libraries print to stdout while loading; the answers must stand there alone.
    answers_out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    job = json.load(sys.stdin)
    json.dump(answer(job), answers_out)
    answers_out.close()


def answer(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Greedy answers of exactly `max_tokens` tokens, in order."""
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.platforms import current_platform

    pool: dict[str, Any] = {}
    if current_platform.is_cpu():
        pool = {"kv_cache_memory_bytes": _CPU_POOL_BYTES, "block_size": 32}
    llm = LLM(
        model=job["model"],
        dtype=job["dtype"],
        max_model_len=job["max_model_len"],
        enable_prefix_caching=False,
        enforce_eager=True,
        **pool,
    )
    outputs = llm.generate(
        [TokensPrompt(prompt_token_ids=request["prompt"]) for request in job["requests"]],
        [
            SamplingParams(temperature=0, max_tokens=request["max_tokens"], ignore_eos=True, logprobs=1)
            for request in job["requests"]
        ],
        use_tqdm=False,
    )
    answers = []
    for output in outputs:
        completion = output.outputs[0]
        tokens = list(completion.token_ids)
        positions: Any = completion.logprobs
        chosen = [position[token].logprob for position, token in zip(positions, tokens, strict=True)]
        answers.append({"answer": tokens, "logprobs": chosen})
    return answers


if __name__ == "__main__":
    main()
