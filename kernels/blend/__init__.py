"""Rows of a sequence that are recomputed alone: `runs` of them as an attention kernel sees them, and their `choice`.

`reference` says in a dense mask what runs must give. Imports: torch; no other room. Any thread, any device.
"""
