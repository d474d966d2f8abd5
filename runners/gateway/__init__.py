"""The HTTP server beside a runner that forwards and captures every model call."""
