"""`python -m load_tests.micro.blend`: what a blend takes compared with a prefill, over HTTP, on one server at a time.

__main__.py   the command line, and the servers
prompts.py    prompts of documents in an order that no other one has, behind beginnings that no other one has
client.py     asks, and times first tokens and the gaps between a neighbour's tokens
measure.py    the questions: first tokens, cold and warm; a neighbour's gaps; contexts that come in every order
report.py     tables and JSON
waterfall.py  a command of its own: a blend part by part, on an engine in this process
"""
