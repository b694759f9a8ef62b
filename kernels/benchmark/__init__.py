"""Kernel throughput compared with memcpy of the same bytes in the same run: ``python -m kernels.benchmark``."""
