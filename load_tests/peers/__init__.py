"""What people use instead of crosskv, as servers to compare with it.

engine.py        the vLLM settings that all of them share with crosskv
serving.py       a Serve application on a Ray of its own, until Ctrl-C
plain_serve.py   plain vLLM replicas behind Ray Serve's default router (power of two choices)
plain_replica.py its deployment: vLLM's own OpenAI server, one engine per replica
serve_llm.py     Ray Serve LLM: `ray.serve.llm` with PrefixCacheAffinityRouter
"""
