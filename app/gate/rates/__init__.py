"""Requests and tokens per minute of each tenant: 429 with `Retry-After`, by `limits` over token buckets."""
