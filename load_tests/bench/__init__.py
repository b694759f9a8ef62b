"""`python -m load_tests.bench`: crosskv against what a Ray user would take instead. Built on `load_tests.measuring`.

__main__.py   the command line
plan.py       what is measured, in which order, and the names of the measurements; choice.py: from words to a plan
arms.py       the servers that are compared
cases.py      the workloads at each size of the working set
measure.py    every arm in turn: start, warm up, send, measure, end
balance.py    requests by replica
figures.py    from single requests to the figures that are compared
summary.py    spreads over the alternations, ratios and targets; report.py: Markdown, JSON and pictures
"""
