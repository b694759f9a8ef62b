"""Rows of a sequence that are recomputed alone: their choice, and runs of them as an attention kernel sees them.

Imports: torch; no other room. Any thread, any device.
"""
