"""Which runs of a prompt's tokens are its chunks.

`recognition` finds those that begin with a separator, `separators` finds out at start what separators there are, and
`given` finds the texts that a request names. `alone` makes chunks of what is given in no prompt.
docs/concepts/blending.md says what a chunk is for.

On the ingress's event loop, or on a thread for long prompts. What finds chunks knows neither requests nor salts;
`requests` makes of chunks what goes to a replica, `ratios` says how much of them is recomputed, and `ingress` is how an
ingress starts them.
"""
