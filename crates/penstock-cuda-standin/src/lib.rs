//! A stand-in for a CUDA device and its driver, in host memory: for tests only.
//!
//! Tests in Rust make a [`Machine`] each and [`find`] the driver's calls by their names. Programs
//! load the crate as a shared library in place of `libcuda.so.1`: it exports the same names. There,
//! the variable [`DEVICES`] says how many devices there are, and whatever a driver forbids ends the
//! process.
//!
//! What it shows: what is called, in which order and with what; that every byte arrives where it
//! belongs, and in time, though streams take their time; what follows when a call fails; and the
//! kernel's text as the PTX manual defines it.
//!
//! What it cannot show: anything about the hardware, its driver, its speed or its memory model; the
//! order of a model's work and copies where that work is the CPU's, since then it is over before a
//! fence is raised; graphs that are captured; several processes on one device; ECC and other
//! faults that only hardware has.

#[allow(unsafe_code)]
mod calls;
// Those of the driver: its names, exported.
#[allow(unsafe_code, non_snake_case)]
mod entries;
#[allow(unsafe_code, non_snake_case)]
mod host_work;
mod machine;
#[allow(unsafe_code, non_snake_case)]
mod memory;
mod ptx;
mod stream;

pub use entries::{find, record};
pub use machine::{
    CROSSOVER, Costs, DEVICES, ILLEGAL_ADDRESS, Kind, Machine, Meanwhile, Range, State,
    TOLD_TO_FAIL, Thing, handle_of,
};
pub use ptx::{Memory, Program, Shape};
pub use stream::{Event, Stream};

use std::ffi::{c_int, c_uint, c_void};

/// A device address: `CUdeviceptr`.
pub(crate) type DevicePtr = u64;

/// An opaque handle: `CUstream`, `CUevent` and others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub(crate) struct Handle(pub(crate) *mut c_void);

/// `CUmemcpyAttributes`.
#[repr(C)]
pub(crate) struct CopyAttributes {
    pub(crate) source_order: c_int,
    pub(crate) source_hint: [c_int; 2],
    pub(crate) target_hint: [c_int; 2],
    pub(crate) flags: c_uint,
}
