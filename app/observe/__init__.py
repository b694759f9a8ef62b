"""`make observe`: Prometheus and Grafana beside a running server, from what the machine has installed."""
