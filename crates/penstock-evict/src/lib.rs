//! Eviction policies, used by bounded stores, the arena and the simulator alike.
