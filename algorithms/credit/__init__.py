"""Credit assignment: rewards in, one advantage for each token out."""
