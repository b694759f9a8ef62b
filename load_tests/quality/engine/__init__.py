"""Blended answers of the probe model in a real engine: `python -m load_tests.quality.engine`.

__main__.py   the command line, the table, and what falls short
questions.py  held-out two-hop questions behind documents that are chunks
asking.py     one engine, and the ways to ask it: whole, blended, rows by chance, naive
judge.py      what the answers come to
"""
