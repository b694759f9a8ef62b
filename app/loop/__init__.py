"""What keeps the ingress's event loop free: all streams and `/health` stand still while one callback runs.

`error_messages` cuts what is told of an error, before vLLM looks for paths in it. May import `gate`.
"""
