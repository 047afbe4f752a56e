//! Whole values, from slices into a file and from a file into slices.

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};

use penstock_contract::slices;

/// Writes all of a value. A file that takes less than it is given is given the rest.
pub(super) fn write_all(mut file: &File, value: &[IoSlice<'_>]) -> io::Result<()> {
    let bytes = slices::len_of(value);
    let mut written = 0;
    while written < bytes {
        let outcome = match written {
            0 => file.write_vectored(value),
            _ => file.write_vectored(&slices::remaining(value, written as usize)),
        };
        match outcome {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(n) => written += n as u64,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Reads so many bytes. Fewer are an error.
pub(super) fn read_all(mut file: &File, into: &mut [IoSliceMut<'_>], bytes: u64) -> io::Result<()> {
    let mut read = 0;
    while read < bytes {
        let outcome = match read {
            0 => file.read_vectored(into),
            _ => file.read_vectored(&mut slices::remaining_mut(into, read as usize)),
        };
        match outcome {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => read += n as u64,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use penstock_contract::ErrorKind;

    use super::*;
    use crate::file::failure;

    /// Linux has a device on which no write ever finds room.
    #[test]
    fn a_device_without_room_is_a_full_pool() {
        let path = Path::new("/dev/full");
        let device = File::options().write(true).open(path).unwrap();
        let value = [IoSlice::new(b"header"), IoSlice::new(b"payload")];
        let error = write_all(&device, &value).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);
        assert_eq!(
            failure::of(error, "write a value", path).kind(),
            ErrorKind::Full
        );
    }
}
