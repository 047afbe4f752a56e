//! Jobs: arena, lanes, completion queue and copies.
