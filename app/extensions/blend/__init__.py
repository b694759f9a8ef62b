"""Which runs of a prompt's tokens are its chunks.

`recognition` finds those that begin with a separator, and the texts that a request names; `separators` finds out at
start what separators there are. docs/concepts/blending.md says what a chunk is for.

On the ingress's event loop, or on a thread for long prompts. What finds chunks knows neither requests nor salts;
`requests` makes of chunks what goes to a replica and says how much of them is recomputed; `ingress` is how an ingress
starts them.
"""
