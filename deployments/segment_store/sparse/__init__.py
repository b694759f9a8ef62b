"""Sparse segments in a store: how they are made of raw ones and opened again, and what was measured for them."""
