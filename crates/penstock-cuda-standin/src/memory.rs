//! The stand-in's memory: registered, pinned, and of the device.

use std::ffi::{c_int, c_uint, c_void};

use crate::DevicePtr;
use crate::calls::{Done, call, give};
use crate::machine::*;

const ALREADY_REGISTERED: i32 = 712;

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemHostRegister_v2(
    address: *mut c_void,
    len: usize,
    flags: c_uint,
) -> c_int {
    call("cuMemHostRegister", |machine| {
        if flags != 3 {
            machine.offence(format!("registered with flags {flags}"));
        }
        let host = address.expose_provenance() as u64;
        let mut state = machine.state.lock();
        let overlaps =
            |range: &Range| host < range.host + range.len && range.host < host + len as u64;
        if state.ranges.iter().any(overlaps) {
            return Err(ALREADY_REGISTERED);
        }
        state.ranges.push(Range {
            host,
            len: len as u64,
            kind: Kind::Registered,
        });
        Ok(())
    })
}

fn remove(machine: &Machine, address: u64, kind: Kind) -> Result<Range, i32> {
    let mut state = machine.state.lock();
    let found = state
        .ranges
        .iter()
        .position(|range| range.kind == kind && range.host == address);
    found
        .map(|index| state.ranges.swap_remove(index))
        .ok_or(INVALID_VALUE)
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemHostUnregister(address: *mut c_void) -> c_int {
    call("cuMemHostUnregister", |machine| {
        machine.synchronize();
        remove(
            machine,
            address.expose_provenance() as u64,
            Kind::Registered,
        )
        .map(drop)
    })
}

/// Memory aligned as the driver's is.
fn layout(len: usize) -> std::alloc::Layout {
    std::alloc::Layout::from_size_align(len, 4096).expect("a small layout")
}

fn allocate(machine: &Machine, len: usize, kind: Kind) -> Result<Range, i32> {
    if len == 0 {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the layout has a size. Zeroed: tests read it all.
    let host = unsafe { std::alloc::alloc_zeroed(layout(len)) };
    let range = Range {
        host: host.expose_provenance() as u64,
        len: len as u64,
        kind,
    };
    machine.state.lock().ranges.push(range);
    Ok(range)
}

fn free(machine: &Machine, host: u64, kind: Kind) -> Done {
    machine.synchronize();
    let range = remove(machine, host, kind)?;
    let at = std::ptr::with_exposed_provenance_mut(range.host as usize);
    // SAFETY: `allocate` made it, of this length.
    unsafe { std::alloc::dealloc(at, layout(range.len as usize)) };
    Ok(())
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemHostAlloc(to: *mut *mut c_void, len: usize, flags: c_uint) -> c_int {
    call("cuMemHostAlloc", |machine| {
        if flags != 3 {
            machine.offence(format!("allocated with flags {flags}"));
        }
        let range = allocate(machine, len, Kind::Pinned)?;
        give(
            to,
            std::ptr::with_exposed_provenance_mut(range.host as usize),
        );
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemFreeHost(address: *mut c_void) -> c_int {
    call("cuMemFreeHost", |machine| {
        free(machine, address.expose_provenance() as u64, Kind::Pinned)
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemAlloc_v2(to: *mut DevicePtr, len: usize) -> c_int {
    call("cuMemAlloc", |machine| {
        give(to, allocate(machine, len, Kind::Device)?.device());
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemFree_v2(address: DevicePtr) -> c_int {
    call("cuMemFree", |machine| {
        let host = machine
            .state
            .lock()
            .ranges
            .iter()
            .find(|range| range.kind == Kind::Device && range.device() == address)
            .map(|range| range.host)
            .ok_or(INVALID_VALUE)?;
        free(machine, host, Kind::Device)
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuPointerGetAttribute(
    to: *mut c_void,
    attribute: c_int,
    address: DevicePtr,
) -> c_int {
    call("cuPointerGetAttribute", |machine| {
        let state = machine.state.lock();
        let inside = |range: &&Range| {
            range.is_host() && (range.host..range.host + range.len).contains(&address)
        };
        let range = state.ranges.iter().find(inside).ok_or(INVALID_VALUE)?;
        match attribute {
            // Host memory.
            2 => give(to.cast(), 1_u32),
            3 => give(to.cast(), range.device() + (address - range.host)),
            _ => return Err(INVALID_VALUE),
        }
        Ok(())
    })
}
