"""vLLM as a policy server: a child process, or servers that are already running."""
