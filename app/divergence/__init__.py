"""Prompts that part from those before them in their first segment, though what follows is the same: how often, and why.

A date, an id or another turn in front makes all that follows another prompt, so none of its stored KV is found.
`divergence` finds the place and looks at its text, `recent_prefixes` remembers how the last prompts began.
"""
