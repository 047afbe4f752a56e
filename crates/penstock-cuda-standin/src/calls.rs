//! What every call of the driver does: it is noted, it may be told to fail, and it finds what its
//! handles stand for.

use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::Handle;
use crate::machine::*;
use crate::stream::{Event, Stream};

const CAPTURE_MODE_RELAXED: i32 = 2;

pub(crate) type Done = Result<(), i32>;

pub(crate) fn code(done: Done) -> c_int {
    done.err().unwrap_or(0)
}

/// Notes the call. Fails if the call is to fail before it does anything.
pub(crate) fn noted(machine: &Machine, name: &'static str) -> Done {
    let mut state = machine.state.lock();
    state.calls.push(name);
    if let Some((_, left)) = state.fail.as_mut().filter(|(call, _)| *call == name) {
        if *left == 0 {
            state.fail = None;
            state.failed = true;
            return Err(TOLD_TO_FAIL);
        }
        *left -= 1;
    }
    state.lost.map_or(Ok(()), Err)
}

/// A call on the thread's context.
pub(crate) fn call(name: &'static str, body: impl FnOnce(&Arc<Machine>) -> Done) -> c_int {
    let (current, mode) = THREAD.with_borrow(|thread| (thread.0.last().copied(), thread.1));
    let Some(Thing::Context(machine)) =
        current.and_then(|handle| things(|all| all.get(&handle).cloned()))
    else {
        return INVALID_CONTEXT;
    };
    if mode != CAPTURE_MODE_RELAXED {
        machine.offence(format!("{name} would spoil the capture of a graph"));
    }
    code(noted(&machine, name).and_then(|()| body(&machine)))
}

/// The stream of a handle; zero is the default stream, where the model computes.
pub(crate) fn stream(machine: &Machine, handle: Handle) -> Result<Arc<Stream>, i32> {
    if handle.0.is_null() {
        return Ok(machine.default_stream());
    }
    match things(|all| all.get(&handle.0.addr()).cloned()) {
        Some(Thing::Stream(stream)) => Ok(stream),
        _ => Err(INVALID_HANDLE),
    }
}

pub(crate) fn event(handle: Handle) -> Result<Arc<Event>, i32> {
    match things(|all| all.get(&handle.0.addr()).cloned()) {
        Some(Thing::Event(event)) => Ok(event),
        _ => Err(INVALID_HANDLE),
    }
}

pub(crate) fn as_handle(number: usize) -> Handle {
    Handle(std::ptr::without_provenance_mut(number))
}

/// Writes a result where the caller wants it.
pub(crate) fn give<T>(to: *mut T, value: T) {
    // SAFETY: callers pass valid places, as the driver demands.
    unsafe { to.write(value) };
}

pub(crate) fn make(machine: &Machine, to: *mut Handle, thing: Thing) -> Done {
    machine.alive.fetch_add(1, Ordering::Relaxed);
    give(to, as_handle(handle_of(thing)));
    Ok(())
}

pub(crate) fn destroy(machine: &Machine, handle: Handle) -> Result<Thing, i32> {
    let thing = things(|all| all.remove(&handle.0.addr())).ok_or(INVALID_HANDLE);
    match &thing {
        Ok(_) => {
            machine.alive.fetch_sub(1, Ordering::Relaxed);
        }
        Err(_) => machine.offence("destroyed twice".to_owned()),
    }
    thing
}
