"""Structured outputs in the engine: each tenant's compiled grammars are its own.

by_tenant.py   vLLM's one backend with a cache for each tenant, and its bound for whitespace in JSON

On the threads of vLLM's grammar executor. Imports vLLM and nothing of the cluster.
"""
