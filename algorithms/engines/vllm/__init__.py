"""vLLM as policy server: a child process or servers that run already."""
