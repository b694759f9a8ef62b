"""The command `crosskv`: what people order and ask of a running server, from a terminal (docs/tools/command_line.md).

`__main__` lists the commands; each has a module of its own. `server` speaks HTTP, `terminal` shows what came: text of a
server is shown as it is, never as markup or as a terminal's commands. `doctor/` says what to change and why. `demo/`
visits every tier with one conversation.

Light: it imports no Ray, torch or vLLM, so that it starts at once. `serve` becomes the program that `make serve` runs.
"""
