"""Conversations whose answers are sampled: what the next turn finds of them."""
