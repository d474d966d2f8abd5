"""Games of frozen policies, by a plan."""
