//! What of a directory reads foreign bytes, for [`crate::fuzz`].

pub(crate) use super::names::key_of;

/// Reads a record of the bytes in use.
pub(crate) fn record(bytes: &[u8]) {
    if let Ok(record) = bytes.try_into() {
        super::usage::check_record(record);
    }
}
