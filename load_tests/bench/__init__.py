"""`python -m load_tests.bench`: crosskv beside what a Ray user would take instead.

__main__.py   the command line
plan.py       what is measured, in which order, and the names of the measurements
arms.py       the servers that are compared
cases.py      the workloads at each size of the working set
servers.py    a server as a process
measure.py    every arm in turn: start, warm up, send, measure, end
balance.py    requests by replica; resources.py: CPU seconds and memory
figures.py    from single requests to the figures that are compared
journal.py    what is measured is kept, and an interrupted run goes on
summary.py    medians, spreads, ratios and targets; report.py: Markdown and JSON; plots.py: pictures
"""
