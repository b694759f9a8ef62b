"""What several measurements stand on: servers, engines, models, and clients that time what is answered.

Imports nothing of the other rooms but `workloads`.
"""
