"""Teams: rewards of roles for verifiers, and what the training of each role is worth."""
