//! Values: their comparison, header, encryption, codes and keys, and whose are trusted.

mod compare;
mod compress;
mod encryption;
mod header;
mod keyring;
mod trust;
