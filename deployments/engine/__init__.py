"""What touches vLLM's engine. A process that happens to be a thread.

`host` runs EngineCore; `wiring` connects a built engine to the cache; `connector` and `scheduler_side` are vLLM's hooks
(what to load, what to save, when); `load_paths/` has the ways for KV to come into a request, each behind one interface;
`request_saves` has the saves, one implementation for each kind of model behind one interface; `pool/` directs the
blocks of the device. `model_identity`, `engine_args` and `checks` say what an engine computes by.

Runs on the engine thread, but for the heartbeat's own. Nothing else may touch vLLM's scheduler or block pool: from
elsewhere, `EngineThread.call`. May import `transfer`, `port` and `protocol`; never Ray. An upgrade of vLLM starts here,
with `tests/deployments/engine/test_engine_contract.py`.
"""
