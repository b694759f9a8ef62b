"""Between the words of clients and those of vLLM, both ways.

A route's reading (`reading`) changes the JSON of a body in place, in time linear in its size, on a thread where the
body is large. It takes nothing for granted: what has another shape than it looks for is left for vLLM to refuse. What
it leaves out is noted (`app.metrics.left_out`), and the answer says so.
"""
