"""`make serve`: checks the settings, runs `serve run` on a Ray of its own, shows progress, and leaves nothing behind.

__main__.py     the command and its exit codes
plan.py         serve_config.yaml + overrides -> what will be started, or one sentence why not
cluster.py      how Ray is started on this machine
serve_run.py    the child process: that Ray, then `serve run`, while reporting status
server.py       the parent's handle on that child and everything it started
readiness.py    asks the server over HTTP whether it serves
progress.py     what the terminal shows
"""
