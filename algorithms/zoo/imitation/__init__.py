"""Imitation of demonstrations, of the best rollouts, or of a teacher."""
