"""Tensors in, tensors out: see README.md."""
