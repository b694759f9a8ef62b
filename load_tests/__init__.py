"""Load tests, benchmarks and measurements against a running server."""
