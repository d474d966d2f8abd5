"""The one loss: policy-gradient weights, ratios, KL penalties, value targets."""
