"""Prometheus: what the ingress counts, and what the manager and the tiers say of themselves.

`ingress` has the ingress's own metrics and `GET /metrics`; `manager` turns reports into metrics; `usage`
adds up where the KV of a request came from.
"""
