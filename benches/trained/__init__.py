"""Small models that have learnt a text, and what can be asked of them."""
