"""Parts of `benches.witness_noise`: families, ways to compute, faults, and the comparison."""
