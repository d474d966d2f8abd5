"""Credit in teams: counterfactuals, COMA, VDN and QMIX."""
