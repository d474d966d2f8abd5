"""The agents' side: a worker claims rollouts and runs the unmodified agent on them, a gateway
beside it forwards and captures every model call. Never imports torch, and nothing heavy here."""
