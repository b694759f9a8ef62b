"""Everything that is a Ray actor or a Serve deployment, and what runs inside one."""
