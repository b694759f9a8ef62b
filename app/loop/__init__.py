"""What keeps the ingress's event loop free: all streams and `/health` stand still while one callback runs.

`error_messages` cuts what is told of an error, before vLLM looks for paths in it. `large_answers` bounds log
probabilities, and makes large answers on a thread. May import `gate`.
"""
