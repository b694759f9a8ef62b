"""The motivating study: what prefill costs, what KV weighs, when moving it beats computing it (`make experiments`).

One module per experiment, listed in `catalogue`; `experiment` says what each consists of. `runner` measures the points
that are not in the journal yet, one engine at a time (`engine_process`), and `report` writes what is there.
"""
