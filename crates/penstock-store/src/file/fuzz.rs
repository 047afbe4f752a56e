//! The parts of the file store that read foreign bytes, for [`crate::fuzz`].

pub(crate) use super::names::key_of;

/// Reads a record of the bytes in use, if there are enough bytes for one.
pub(crate) fn record(bytes: &[u8]) {
    if let Some(record) = bytes.first_chunk() {
        super::usage::check_record(record);
    }
}
