"""`python -m load_tests.micro.sparse_hit`: tolerant documents that come back from Redis, dense and sparse, over HTTP.

__main__.py   the command line, and the servers, one at a time
talks.py      documents with questions: of the demo model's worlds, or common words for models with random weights
client.py     asks one server, and times first tokens
measure.py    one round: computed, cooled to Redis, asked again
report.py     tables and JSON
"""
