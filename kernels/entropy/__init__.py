"""Entropy coding of byte symbols: `rans`, with the static tables of `symbol_table`.

`rans` checks and calls `rans_cpu` (Numba, AVX-512 where there is some); `rans_reference` says in plain Python what it
must give. Imports: numpy, Numba and `kernels.errors`; no other room. Any thread, without the GIL.
"""
