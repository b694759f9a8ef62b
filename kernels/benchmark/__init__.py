"""How fast the kernels are, beside memcpy of the same bytes in the same run: ``python -m kernels.benchmark``."""
