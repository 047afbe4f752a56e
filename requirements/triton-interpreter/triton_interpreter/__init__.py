"""A backend of Triton that leaves everything to its interpreter."""
