"""`crosskv doctor`: from a server's live figures to what should be changed, and why.

`figures` is all that the rules see, plain values; `gathered` fills them from the server's answers, `settings_file` from
a configuration that no server runs. `rules/` has one small function for each piece of advice. A rule says nothing while
too little was seen. `command` applies them all and shows what they say.
"""
