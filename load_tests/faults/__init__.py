"""Every part of a running server fails in every way that issues 3 and 33 name, and two at once: what requests see.

redis_process.py  a redis-server of our own, and a proxy before it that can be slow or deaf
prompts.py        what the streams ask: plain prompts, or documents in new orders
streams.py        streamed requests, and what came of each
inside.py         faults inside the actors of a running server; the product has no switch for them
inside_engine.py  faults where an engine computes, in whichever process that is
lost_answers.py   a manager whose answers are lost
catalogue.py      the faults: how to cause each, how to end it
two_nodes.py      the link between two nodes is cut; a program of its own
trial.py          one fault: streams before, during and after it, held against undisturbed answers
__main__.py       all of them as a table
"""
