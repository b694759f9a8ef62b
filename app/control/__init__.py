"""What people order and ask: `/api/v1/kv/*`, `/api/v1/layerwise/stats`, `/api/v1/settings`.

`api` looks up, shows and clears; `diverge` compares prompts; `moves` pins, prefetches and moves, `orders` evicts and
compresses, as `jobs` that can be polled; `prompt_param` reads which prompt is meant, and whose; `administrators` shows
what they alone may see. Each change is a line of the `audit` log.

On the ingress's event loop. May import `openai`, `events`, `backend`, `gate` and `metrics`.
"""
