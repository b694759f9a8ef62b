"""The brain: what exists where, how hot it is, and what should move. Plain Python, no I/O."""
