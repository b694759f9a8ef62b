"""How much of what is random, repeated or slow a run takes: `make test`'s sizes, or those of `make test-long`.

A test whose claim `make test` holds elsewhere sooner is marked `long`, with that other test's name: `make test` leaves
it out.
"""

from __future__ import annotations

import os

LONG = os.environ.get("CROSSKV_LONG") == "1"

OPERATIONS = int(os.environ.get("CROSSKV_OPERATIONS", 100_000 if LONG else 20_000))
"""Of the manager, beside the naive one."""
RULES_RUN = 200 if LONG else 80
"""Runs of up to 40 operations that Hypothesis chooses for it."""
LIVES = 60 if LONG else 24
"""Random lives of a world beside a plain record of it."""
FULL_INDEX = 150 if LONG else 60
"""Prompts of 128 segments that fill an index, where another one is full with four."""
SLICED_SEGMENTS = (10_000, 30_000) if LONG else (2_000, 6_000)
"""Of two indexes of which one is three times the other: a slice of a sweep is as much work in both."""
SHOWN_NODES = 100_000 if LONG else 40_000
"""Of the trees of which a view shows some; it may look at 20,288 (`kvmanager.views.tree`)."""
CODED_INPUTS = 100_000 if LONG else 20_000
"""For the decoder, of bytes that no encoder wrote."""
CONVERSATIONS = 40 if LONG else 16
"""Held against plain vLLM, on each of two servers."""
STREAMS, STREAMED_TOKENS = (6, 64) if LONG else (4, 48)
"""Of each fault: at once, and each."""
CLIENTS = 1_000 if LONG else 250
"""At once, of a server that takes 128."""
FUZZED_REQUESTS = 480 if LONG else 240
