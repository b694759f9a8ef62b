"""Secrets among the settings: where they may stand, and what of them other processes are told.

api_keys.py   keys: plain or as digests, from the settings, a file, the environment
handed_on.py  settings that hold a secret: the file that they may stand in, and `args:` without them
"""
