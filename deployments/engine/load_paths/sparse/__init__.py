"""Attention of vLLM to a sparse prefix: as if the keys that a layer has dropped were masked. See README.md."""
