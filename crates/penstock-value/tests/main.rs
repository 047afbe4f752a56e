//! Values: their header, encryption, codes and keys.

mod compress;
mod encryption;
mod header;
mod keyring;
