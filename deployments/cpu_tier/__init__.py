"""The node's tier: sealed segments in Ray's object store, and the workers that move them to and from Redis.

`actor` owns the objects and counts their bytes; `prefetch_pool` shares loads among workers; `prefetch_worker` is one of
them.

An actor per node on its event loop; each worker is an actor with read, write, life and report threads.
May import `segment_store` and `protocol`. Never vLLM or torch.
"""
