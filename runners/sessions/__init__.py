"""Sessions of a deployed agent, recorded by `agentrl gateway serve`, and its users' feedback."""
