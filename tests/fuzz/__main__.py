"""`make fuzz`: see README.md beside this file."""

from __future__ import annotations

import argparse
import secrets
import sys
import time

import environment  # noqa: F401
from api_fuzz import MOST_SHOWN, ApiFuzz
from decoder_fuzz import DecoderFuzz
from fake_backend import FakeReplicas, backend
from ingress_server import engine_args, serve

from app.ingress import frontend_config

ALICE, BOB, WRONG, NONE = ("alice", "key-of-alice"), ("bob", "key-of-bob"), ("wrong", "wrong"), ("none", None)
ADMIN = ("admin", "key-of-root")
KEYS = [ALICE, ADMIN, BOB, ALICE, ADMIN, WRONG, ALICE, ADMIN, NONE]
"""Whose key the requests carry, in turn."""
API_KEYS = {"key-of-alice": "alice", "key-of-bob": "bob", "key-of-root": {"tenant": "root", "admin": True}}


def main() -> int:
    """Run it all; 1 when something failed."""
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000, help="requests, at least (10000)")
    parser.add_argument("--inputs", type=int, default=5_000, help="inputs for each decoder (5000)")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**32), help="repeat the run that printed it")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    decoders = DecoderFuzz(options.seed)
    decoders.run(options.inputs)
    for (name, outcome), count in sorted(decoders.outcomes.items()):
        print(f"{name:34}{outcome:>10}{count:>8}")
    vllm_config = frontend_config(engine_args())
    failures = {what: f"input: {data}" for what, data in decoders.failures.items()}
    # With keys, where most requests must be let in to mean something; then a tenth without, as on a laptop.
    for keys, api_keys, cases in ((KEYS, API_KEYS, options.cases), ([("open", None)], {}, options.cases // 10)):
        began = time.monotonic()
        with serve(vllm_config, backend(FakeReplicas()), api_keys=api_keys) as server:
            report = ApiFuzz(server.url, keys, options.seed).run(cases)
        whose = "with keys" if api_keys else "without keys"
        print(f"\n{report.cases} requests {whose}, {time.monotonic() - began:.0f} s\n{report.table()}", flush=True)
        failures |= report.failures
    for what, how in list(failures.items())[:MOST_SHOWN]:
        print(f"\nFAILED {what}\n  {how}")
    print(f"\n{len(failures)} failures" + (f"; repeat with --seed {options.seed}" if failures else ""))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
