"""Chunks of blended prompts whose KV is missing are computed alone, and so stored (`blending.fill`).

`precompute` decides which and when, `turns` finds idle time for them, `chunks` makes requests of them; `orders`
computes what is ordered by hand. A precomputed chunk is an exact request that the ingress sends as any other: with its
poison registry, its retries, its routing. On the ingress's event loop.
"""
