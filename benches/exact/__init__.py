"""What `benches.exactness` is made of: families of models, pools, faults, and the reference."""
