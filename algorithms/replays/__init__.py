"""Trees and counterfactuals: rollouts that repeat a part of another one, and join its group."""
