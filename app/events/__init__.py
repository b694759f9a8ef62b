"""GET /api/v1/events: the cache live, for watching clients, as server-sent events.

`watchers` are these clients, behind bounded queues, and the route; `decisions` are what the requests of this ingress
say of themselves, `savings` what of it adds up; `feed` asks the manager once a second, for all watchers together.

On the ingress's event loop. May import `backend`, `gate` and `metrics`; `openai` tells it what becomes of prompts.
"""
