"""The policy server in the learner's process."""
