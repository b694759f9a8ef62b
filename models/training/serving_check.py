"""`python -m models.training.serving_check`: the exported model through vLLM against the expected answers.

Real generation, token by token in bf16 through the paged KV cache, on held-out conversations: what a user of the server
gets, where `evaluate` only computes what greedy decoding would write.
"""

from __future__ import annotations

import argparse
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

from models.training.dialogue import Turn
from models.training.evaluate import EVALUATION_SEED, MEASURED_KINDS, heldout_dialogue

# Before vLLM is imported: one thread, a small KV cache (GiB), nothing fetched.
SERVING_ENVIRONMENT: dict[str, str] = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
}


def main() -> None:
    """Ask held-out questions at each context length, print what differs and the counts; then sample a greeting."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path(__file__).resolve().parent.parent / "demo")
    parser.add_argument("--context", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--conversations", type=int, default=6)
    arguments = parser.parse_args()
    for name, value in SERVING_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=str(arguments.model), enforce_eager=True, dtype="bfloat16", max_model_len=4096, block_size=32, seed=0
    )
    greedy = SamplingParams(temperature=0.0, max_tokens=128)
    tokenizer: Any = engine.get_tokenizer()
    for context in arguments.context:
        prompts: list[Any] = []
        expected: list[Turn] = []
        for number in range(arguments.conversations):
            dialogue = heldout_dialogue(EVALUATION_SEED + number, context, MEASURED_KINDS)
            for index, turn in enumerate(dialogue.turns):
                rendered = tokenizer.apply_chat_template(
                    dialogue.messages(index + 1, last_answer=False),
                    documents=dialogue.documents or None,
                    add_generation_prompt=True,
                    tokenize=True,
                    return_dict=False,
                )
                prompts.append({"prompt_token_ids": rendered})
                expected.append(turn)
        tally: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        for output, turn in zip(engine.generate(prompts, greedy, use_tqdm=False), expected, strict=True):
            answer = output.outputs[0].text
            tally[turn.kind][0] += answer == turn.answer
            tally[turn.kind][1] += 1
            if answer != turn.answer:
                print(f"  {turn.kind}: {turn.question!r} expected {turn.answer!r} got {answer!r}")
        print(f"{context} tokens:", ", ".join(f"{kind} {r}/{n}" for kind, (r, n) in sorted(tally.items())), flush=True)
    sampled = SamplingParams(temperature=1.2, max_tokens=128, n=8, seed=1)
    hello = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello!"}], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    greeting: Any = {"prompt_token_ids": hello}
    answers = engine.generate([greeting], sampled, use_tqdm=False)[0].outputs
    for sampled_answer in answers:
        print(len(sampled_answer.token_ids), repr(sampled_answer.text))


if __name__ == "__main__":
    main()
