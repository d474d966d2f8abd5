"""Judges: models whose verdicts on rollouts are rewards."""
