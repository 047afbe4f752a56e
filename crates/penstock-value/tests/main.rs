//! Values: their header, encryption, codes and keys, and whose are trusted.

mod compress;
mod encryption;
mod header;
mod keyring;
mod trust;
