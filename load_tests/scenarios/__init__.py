"""What each scenario (`configs/scenarios/`) brings beside the defaults, on a workload that fits it."""
