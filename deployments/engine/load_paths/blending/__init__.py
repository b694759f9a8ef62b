"""Chunks' KV blended into prompts, in slices between the engine's steps: README.md."""
