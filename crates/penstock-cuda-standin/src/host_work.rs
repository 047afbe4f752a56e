//! What programs use that load the stand-in as a library: devices by a variable, work of the host on
//! a stream, and their memory taken for the device's.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use crate::Handle;
use crate::calls::{call, give, stream};
use crate::machine::{INVALID_VALUE, Machine};

/// A function of the program: `CUhostFn`.
type HostFunction = unsafe extern "C" fn(*mut c_void);

/// What a function of the program is called with.
struct Argument(*mut c_void);

// SAFETY: an address that is only handed back to the program, which has it used from a stream.
unsafe impl Send for Argument {}

impl Argument {
    fn get(self) -> *mut c_void {
        self.0
    }
}

/// Has a stream call a function of the program, in its turn.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuLaunchHostFunc(
    on: Handle,
    function: Option<HostFunction>,
    argument: *mut c_void,
) -> c_int {
    call("cuLaunchHostFunc", |machine| {
        let function = function.ok_or(INVALID_VALUE)?;
        let argument = Argument(argument);
        stream(machine, on)?.push(move |_| {
            // SAFETY: the program's function, which stays as long as work is on the stream.
            unsafe {
                function(argument.get());
            }
        });
        Ok(())
    })
}

/// Takes memory of the program for a device's. Writes its address for the device; answers whether
/// there is such a device. The memory stays mapped until it is forgotten.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn penstock_standin_adopt(
    ordinal: c_int,
    host: *mut c_void,
    len: usize,
    address: *mut u64,
) -> c_int {
    let Some(machine) = Machine::find(ordinal) else {
        return INVALID_VALUE;
    };
    give(address, adopted(&machine, host.cast(), len));
    0
}

/// Adopts memory once, though a program asks again.
fn adopted(machine: &Arc<Machine>, host: *mut u8, len: usize) -> u64 {
    machine.forget(host);
    machine.adopt(host, len)
}

/// Memory of the program is no more the device's.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn penstock_standin_forget(ordinal: c_int, host: *mut c_void) -> c_int {
    let Some(machine) = Machine::find(ordinal) else {
        return INVALID_VALUE;
    };
    machine.forget(host.cast());
    0
}

/// How often a call of the driver was made, by its name as `cuda.h` has it, without a version.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn penstock_standin_calls(
    ordinal: c_int,
    name: *const std::ffi::c_char,
) -> usize {
    // SAFETY: the program's name ends with a zero.
    let name = unsafe { std::ffi::CStr::from_ptr(name) };
    Machine::find(ordinal).map_or(0, |machine| {
        machine.calls(name.to_str().unwrap_or_default())
    })
}
