"""What people order and ask: `/api/v1/kv/*` and `/api/v1/layerwise/stats`.

`api` looks up, shows and clears; `trie` shows the index as a tree, `live` feeds the event stream; `moves` pins,
prefetches and moves, as `jobs` that can be polled; `prompt_param` reads which prompt is meant, and whose.

On the ingress's event loop. May import `openai`, `events`, `backend`, `gate` and `metrics`.
"""
