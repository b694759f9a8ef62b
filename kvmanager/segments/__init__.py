"""What a segment is: its key, its place in a sequence, its bytes.

`keys` names prefixes by vLLM's chained hashes; `spans` cuts a sequence; `format`, `head`, `header`, `sizes` and
`mismatch` are the bytes that are stored and why they are refused; `guard` and `server_secret` keep strangers from
planting segments.

The lowest room: imports none of the others. Start with `keys`.
"""
