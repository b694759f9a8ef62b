"""Answers come back as they were sampled.

`memory` keeps the tokens; `turns` puts them into the next prompt where their text has come back; `returns` learns whose
answers come back, and says why one did not; `lengths` learns how long they are.

On the ingress's event loop. Knows tokens and texts, neither vLLM nor requests: `app.openai.chat_renderer` brings the
two together and finds out how a chat template marks turns, `app.openai.observers` listens to outputs. May import
`metrics`.
"""
