"""HTTP: the Serve application and the command that starts it."""
