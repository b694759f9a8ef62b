"""The OpenAI surface: vLLM's own serving classes over a client that speaks to the replicas.

`api` adds the routes; `engine_client` is the `EngineClient` under vLLM's classes; `retries` sends a prompt again when
its replica is gone, `poison_registry` says when not to; `constraint_pool` compiles constraints in a process that can be
ended; `large_answers` bounds log probabilities, and makes large answers on a thread; `vocabulary` refuses tokens that
the model has no row for.

On the ingress's event loop. May import `answers`, `backend`, `gate` and `metrics`. There is no second OpenAI protocol
here.
"""
