"""Keys moved to other positions: `shift.shift_keys`.

`shift` checks and picks; `reference` says in torch what `cpu` (Numba) and `triton` must give.
Imports: torch, numpy, Numba; Triton in `triton` alone; no other room. Any thread, without the GIL.
"""
