"""Small models with random weights, made on the spot: one file for each kind."""
