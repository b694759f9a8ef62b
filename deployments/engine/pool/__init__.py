"""The blocks of one device: which leave first, what is brought and handed over.

`hotness_queue` orders vLLM's free blocks by rank; `control` carries out directives in slices between two
steps; `events` tells what the pool holds; `hidden_blocks` keeps what has not arrived out of the prefix cache.

Runs on the engine thread. May import `transfer`'s jobs and `protocol`. Leans on vLLM's `BlockPool` and its free queue.
"""
