"""Live streams: what each has answered, so that another replica can go on with it, and who moves them.

`generated_tokens` remembers what a stream has yielded; `app.openai.retries` continues it when its replica is gone.
`live` knows the streams that run now, `moves` shows and moves them on an administrator's word, or because a replica is
short of KV. `handover` begins streams at one replica on purpose, to go on at another.
"""
