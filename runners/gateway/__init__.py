"""HTTP server in a runner's process that forwards and captures every model call."""
