//! The stores and the layers over them, on disks, in memory, and against real servers.

mod behaviour;
mod coded;
mod file;
mod file_access;
mod file_faults;
mod layers;
mod memory;
mod object;
mod object_hostile;
mod object_server;
mod open;
mod quota;
mod registered;
mod resp;
mod resp_access;
mod resp_cluster;
mod resp_connections;
mod resp_hostile;
mod resp_refusals;
mod resp_sentinel;
mod resp_server;
mod resp_tls;
mod sealed;
mod shm;
mod shm_in_place;
mod tiers;
