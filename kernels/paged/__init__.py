"""Between the blocks of vLLM's paged KV cache and segments: `gather_scatter`, over `layout`.

`gather_scatter` checks and picks; `reference` says in torch what `cpu` (Numba), `index` (torch) and `triton` must give.
Imports: torch, numpy, Numba; Triton in `triton` alone; no other room. Any thread, without the GIL while bytes move.
Start with `layout.LayoutKind`, then `reference`, which says the same in fifty lines of torch.
"""
