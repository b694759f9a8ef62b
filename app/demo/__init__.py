"""`make demo`: a scripted conversation over documents with a running server, as a table whose every row is checked.

__main__.py       the command and its exit codes
documents.py      the documents, the questions, and what a right answer is
known_kv.py       how many tokens of a prompt must be reused, from which tier, after what was sent before
stage.py          one turn: ask, compare, show, remember
scenes.py         the script, turn by turn
redis_scenes.py   the part of it that needs Redis: all other tiers emptied, and the whole server restarted
restart.py        that restart, by a signal to the server's launcher
server.py         the HTTP calls: OpenAI's own client, and the control API
report.py         the table, live on a terminal, and the same as data

It speaks HTTP only, so it can run on any machine that reaches a server. For the restart alone it looks for a launcher
on its own machine (`app.launch.run_folder`); without one, or with `--no-restart`, that row is left out.
"""
