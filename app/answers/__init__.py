"""Answers come back as they were sampled.

`sampled` listens to outputs and `memory` keeps the tokens; `turns` puts them into the next prompt where their text has
come back; `returns` learns whose answers come back, `lengths` how long they are; `divergence` says why one did not.

On the ingress's event loop. Knows tokens and texts, neither vLLM nor requests: `app.openai.chat_renderer` brings the
two together, `app.openai.chat_renderer` finds out how a chat template marks turns. May import `metrics`.
"""
