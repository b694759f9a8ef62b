"""`make serve`: checks the settings, runs `serve run` on a Ray of its own, shows progress, and leaves nothing behind.

__main__.py     the command and its exit codes; one life after another while restarts are asked for
life.py         one life of the server: start, ready, serve, stop, and what the terminal says meanwhile
plan.py         serve_config.yaml + overrides -> what will be started, or one sentence why not
signals.py      stop or restart: what Ctrl-C, SIGTERM, SIGHUP and a `make` above ask for
run_folder.py   the server's files, and which process launched it
cluster.py      how Ray is started on this machine
serve_run.py    the child process: that Ray, then `serve run`, while reporting status
server.py       the parent's handle on that child
descendants.py  everything that the child started, and how it is ended
readiness.py    asks the server over HTTP whether it serves, and what it does without
progress.py     the steps of a start on the terminal
surroundings/   what the machine and the shell must have, and what is done where they have not
"""
