"""Copies between the paged KV cache and sealed segments, in parallel with computation.

`threads` loads and saves; `jobs` says what one load or save is; `segment_copy` copies and verifies a segment;
`shared_loads` lets requests wait for a load of another; `layerwise_*` moves KV layer by layer while the model computes.

Runs on the load and save threads; a layerwise load has a thread of its own, and its steps run on the engine thread.
Imports torch and `kernels`, never vLLM's scheduler and never Ray. A block that a copy reads or writes is held until the
copy has ended.
"""
