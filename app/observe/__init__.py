"""What watches a server in addition to its metrics: `traces` makes OpenTelemetry spans of prompts that have ended."""
