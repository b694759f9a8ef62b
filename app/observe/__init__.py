"""Tools that watch a server, in addition to its metrics.

`traces` makes OpenTelemetry spans of prompts that have ended. `make observe` (`__main__`, `configuration`) starts
Prometheus and Grafana for a running server, from what the machine has installed; it is a process of its own.
"""
