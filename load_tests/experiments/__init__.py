"""The motivating study: what prefill costs, what KV weighs, when moving it beats computing it (`make experiments`).

The ten experiments are classes by what they are about: `prefill`, `memory`, `batches`, `moving` and `swap`;
`__main__` has them in the order of the study, and `experiment` says what each consists of. `runner` measures the
points that are not in the journal yet, one engine at a time (`engine_process`), and `report` writes what is there.
"""
