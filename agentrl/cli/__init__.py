"""The command line: `agentrl COMMAND`."""
