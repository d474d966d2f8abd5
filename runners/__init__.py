"""Agent side: a worker claims rollouts and runs the unmodified agent on them; a gateway in the
same process forwards and captures every model call. Never imports torch or other heavy modules."""
