"""`make demo`: a scripted conversation over documents with a running server, as a table whose every row is checked.

__main__.py     the command and its exit codes
documents.py    the documents, the questions, and what a right answer is
known_kv.py     how many tokens of a prompt must be reused, from which tier, after what was sent before
scenes.py       the script, turn by turn
server.py       the HTTP calls: OpenAI's own client, and the control API
report.py       the table, live on a terminal, and the same as data

It speaks HTTP only and imports nothing of the server, so it can run on any machine that reaches one.
"""
