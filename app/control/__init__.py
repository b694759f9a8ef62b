"""What people order and ask: `/api/v1/kv/*`, `/api/v1/layerwise/stats`, `/api/v1/settings` (`effective`).

`api` looks up, shows and clears; `moves` pins, prefetches and moves, as `jobs` that can be polled; `prompt_param` reads
which prompt is meant, and whose.

On the ingress's event loop. May import `openai`, `backend`, `gate` and `metrics`.
"""
