"""`crosskv demo`: a conversation over documents that visits every tier, as rows each of which is checked.

`documents` holds the text, the questions and what a right answer is. `turns` asks one question and compares what was
reused with what must be. `command` is the script.
"""
