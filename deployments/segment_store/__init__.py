"""Moves the bytes of a segment into Redis and out of it: layers over one transport.

From outside in: `checked_store` verifies, `coded_store` codes, `endpoint` keys the checksums with the server's secret
and builds the stack, `redis_store` moves the parts. `redis_profiles`, `codec_files` and `segment_codecs` say which
codec with which profile.

Runs on whichever thread calls. Imports `kernels` and redis; never Ray, vLLM or torch.
"""
