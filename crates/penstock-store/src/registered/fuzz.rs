//! What fuzz tests need of what programs say.
