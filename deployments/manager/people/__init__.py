"""What the manager tells people, and takes from them: the calls of the control API, and the news of what it ordered.

On the manager's event loop. May import the rooms that `deployments.manager` may.
"""
