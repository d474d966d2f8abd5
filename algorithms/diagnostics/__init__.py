"""What a step did: metrics, credit records, explanations."""
