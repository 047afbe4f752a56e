#![doc = include_str!("../README.md")]

mod cache;
mod error;
mod files;
mod pieces;
mod stamp;

pub use error::{DigestError, Result};
pub use files::{FileDigests, Progress};
pub use pieces::{Digest, PIECE_BYTES, digest_bytes};
