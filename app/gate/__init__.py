"""What every request passes before it costs anything: key, rate, size, room.

`auth` says who asks (401, 403); `rates` how much (429); `body_limit`, `bounded_json` and `request_bounds` how large
(413, 429, 400); `not_done` which fields are not obeyed (400); `admission` and `fair_shares` when it is its turn (429);
`request_context` is what travels with it; `errors` has OpenAI's shape of an error; `bound_host` refuses an open server
without keys.

ASGI middlewares and pure parts, on the ingress's event loop. May import `metrics`.
"""
