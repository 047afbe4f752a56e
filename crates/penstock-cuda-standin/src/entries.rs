//! The stand-in's entries: what the driver's calls do to a [`Machine`].

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::Arc;

use crate::calls::*;
use crate::host_work::cuLaunchHostFunc;
use crate::machine::*;
use crate::memory::*;
use crate::ptx::{Program, Shape};
use crate::stream::{Event, Stream};
use crate::{CopyAttributes, DevicePtr, Handle};

const INVALID_DEVICE: i32 = 101;
const INVALID_PTX: i32 = 218;
const NOT_FOUND: i32 = 500;
const NOT_READY: i32 = 600;
const MULTIPROCESSOR_COUNT: i32 = 16;
const LEAST_PRIORITY: i32 = 0;
const GREATEST_PRIORITY: i32 = -5;

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuInit(_flags: c_uint) -> c_int {
    Machine::make_all();
    0
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuGetErrorName(code: c_int, name: *mut *const c_char) -> c_int {
    if code == TOLD_TO_FAIL {
        give(name, c"CUDA_ERROR_UNKNOWN".as_ptr());
        return 0;
    }
    INVALID_VALUE
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> c_int {
    code((|| {
        let machine = Machine::find(ordinal).ok_or(INVALID_DEVICE)?;
        noted(&machine, "cuDeviceGet")?;
        give(device, ordinal);
        Ok(())
    })())
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuDeviceGetAttribute(
    to: *mut c_int,
    attribute: c_int,
    device: c_int,
) -> c_int {
    code((|| {
        let machine = Machine::find(device).ok_or(INVALID_DEVICE)?;
        noted(&machine, "cuDeviceGetAttribute")?;
        if attribute != MULTIPROCESSOR_COUNT {
            return Err(INVALID_VALUE);
        }
        give(to, machine.state.lock().multiprocessors.unwrap_or(132));
        Ok(())
    })())
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuDevicePrimaryCtxRetain(context: *mut Handle, device: c_int) -> c_int {
    code((|| {
        let machine = Machine::find(device).ok_or(INVALID_DEVICE)?;
        noted(&machine, "cuDevicePrimaryCtxRetain")?;
        machine.state.lock().held += 1;
        let handle = handle_of(Thing::Context(machine));
        give(context, as_handle(handle));
        Ok(())
    })())
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuDevicePrimaryCtxRelease_v2(device: c_int) -> c_int {
    code((|| {
        let machine = Machine::find(device).ok_or(INVALID_DEVICE)?;
        noted(&machine, "cuDevicePrimaryCtxRelease")?;
        let mut state = machine.state.lock();
        state.held = state.held.checked_sub(1).ok_or(INVALID_CONTEXT)?;
        Ok(())
    })())
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuCtxPushCurrent_v2(context: Handle) -> c_int {
    let Some(Thing::Context(machine)) = things(|all| all.get(&context.0.addr()).cloned()) else {
        return INVALID_CONTEXT;
    };
    code(noted(&machine, "cuCtxPushCurrent").map(|()| {
        THREAD.with_borrow_mut(|thread| thread.0.push(context.0.addr()));
    }))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuCtxPopCurrent_v2(context: *mut Handle) -> c_int {
    match THREAD.with_borrow_mut(|thread| thread.0.pop()) {
        Some(handle) => {
            give(context, as_handle(handle));
            0
        }
        None => INVALID_CONTEXT,
    }
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuThreadExchangeStreamCaptureMode(mode: *mut c_int) -> c_int {
    let current = THREAD.with_borrow(|thread| thread.0.last().copied());
    let Some(Thing::Context(machine)) =
        current.and_then(|handle| things(|all| all.get(&handle).cloned()))
    else {
        return INVALID_CONTEXT;
    };
    code(
        noted(&machine, "cuThreadExchangeStreamCaptureMode").map(|()| {
            // SAFETY: the caller's place is valid.
            let wanted = unsafe { mode.read() };
            give(
                mode,
                THREAD.with_borrow_mut(|thread| std::mem::replace(&mut thread.1, wanted)),
            );
        }),
    )
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuCtxGetStreamPriorityRange(
    least: *mut c_int,
    greatest: *mut c_int,
) -> c_int {
    call("cuCtxGetStreamPriorityRange", |_| {
        give(least, LEAST_PRIORITY);
        give(greatest, GREATEST_PRIORITY);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuStreamCreateWithPriority(
    to: *mut Handle,
    flags: c_uint,
    priority: c_int,
) -> c_int {
    call("cuStreamCreateWithPriority", |machine| {
        if (flags, priority) != (1, LEAST_PRIORITY) {
            machine.offence(format!("a stream of priority {priority}, flags {flags}"));
        }
        let stream = Stream::new();
        machine.watch(&stream);
        make(machine, to, Thing::Stream(stream))
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuStreamDestroy_v2(handle: Handle) -> c_int {
    call("cuStreamDestroy", |machine| {
        let Thing::Stream(stream) = destroy(machine, handle)? else {
            return Err(INVALID_HANDLE);
        };
        if !stream.is_idle() {
            machine.offence("a stream was destroyed at work".to_owned());
        }
        stream.close();
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuStreamSynchronize(handle: Handle) -> c_int {
    call("cuStreamSynchronize", |machine| {
        stream(machine, handle)?.synchronize();
        machine.state.lock().lost.map_or(Ok(()), Err)
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuEventCreate(to: *mut Handle, flags: c_uint) -> c_int {
    call("cuEventCreate", |machine| {
        if flags & 1 == 0 {
            machine.offence("waiting for an event that spins".to_owned());
        }
        let event = Event {
            timed: flags & 2 == 0,
            ..Event::default()
        };
        make(machine, to, Thing::Event(Arc::new(event)))
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuEventDestroy_v2(handle: Handle) -> c_int {
    call("cuEventDestroy", |machine| {
        destroy(machine, handle).map(drop)
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuEventRecord(handle: Handle, on: Handle) -> c_int {
    call("cuEventRecord", |machine| {
        record(&event(handle)?, &*stream(machine, on)?);
        Ok(())
    })
}

/// Records an event on a stream.
pub fn record(event: &Arc<Event>, stream: &Stream) {
    let record = {
        let mut state = event.state.lock();
        state.0 += 1;
        state.0
    };
    let event = Arc::clone(event);
    stream.push(move |clock| {
        let mut state = event.state.lock();
        state.1 = state.1.max(record);
        state.2 = *clock;
        event.changed.notify_all();
    });
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuEventSynchronize(handle: Handle) -> c_int {
    call("cuEventSynchronize", |machine| {
        let event = event(handle)?;
        let record = event.state.lock().0;
        event.wait(record);
        machine.state.lock().lost.map_or(Ok(()), Err)
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuEventQuery(handle: Handle) -> c_int {
    call("cuEventQuery", |machine| {
        let event = event(handle)?;
        let state = event.state.lock();
        if state.1 < state.0 {
            return Err(NOT_READY);
        }
        machine.state.lock().lost.map_or(Ok(()), Err)
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuEventElapsedTime(
    milliseconds: *mut f32,
    start: Handle,
    end: Handle,
) -> c_int {
    call("cuEventElapsedTime", |_| {
        let (start, end) = (event(start)?, event(end)?);
        if !start.timed || !end.timed {
            return Err(INVALID_HANDLE);
        }
        let seconds = end.state.lock().2 - start.state.lock().2;
        give(milliseconds, (seconds * 1e3) as f32);
        Ok(())
    })
}

/// The time of a copy engine's copy, by its direction. Of the costs, the first are those towards
/// the host.
fn engine_seconds(machine: &Machine, to: u64, len: u64) -> f64 {
    let is_gather = machine.resolve(Reach::Device, to, len).is_none();
    let costs = machine.state.lock().costs;
    costs.map_or(0.0, |(gather, scatter)| {
        let costs = if is_gather { gather } else { scatter };
        costs.engine_piece + costs.engine_byte * len as f64
    })
}

/// A copy engine's copy of one piece. `to` or `from` may be unpinned.
fn copy_one(name: &'static str, to: u64, from: u64, host: u64, len: u64, on: Handle) -> c_int {
    call(name, |machine| {
        let stream = stream(machine, on)?;
        let pinned = machine.resolve(Reach::CopyEngine, host, len).is_some();
        let machine = Arc::clone(machine);
        stream.push_copy(move |clock| {
            *clock += engine_seconds(&machine, to, len);
            machine.copy(to, from, len, (!pinned).then_some(host));
        });
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemcpyDtoHAsync_v2(
    to: *mut c_void,
    from: DevicePtr,
    len: usize,
    on: Handle,
) -> c_int {
    let host = to.expose_provenance() as u64;
    copy_one("cuMemcpyDtoHAsync", host, from, host, len as u64, on)
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemcpyHtoDAsync_v2(
    to: DevicePtr,
    from: *const c_void,
    len: usize,
    on: Handle,
) -> c_int {
    let host = from.expose_provenance() as u64;
    copy_one("cuMemcpyHtoDAsync", to, host, host, len as u64, on)
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemcpyBatchAsync(
    to: *mut DevicePtr,
    from: *mut DevicePtr,
    bytes: *mut usize,
    count: usize,
    attributes: *mut CopyAttributes,
    firsts: *mut usize,
    kinds: usize,
    _failed: *mut usize,
    on: Handle,
) -> c_int {
    call("cuMemcpyBatchAsync", |machine| {
        if machine.state.lock().without_batches {
            return Err(NOT_SUPPORTED);
        }
        let stream = stream(machine, on)?;
        // SAFETY: arrays as long as `count`, and one of attributes.
        let (to, from, bytes, order, first) = unsafe {
            (
                std::slice::from_raw_parts(to, count).to_vec(),
                std::slice::from_raw_parts(from, count).to_vec(),
                std::slice::from_raw_parts(bytes, count).to_vec(),
                (*attributes).source_order,
                *firsts,
            )
        };
        if kinds != 1 || first != 0 || order != 1 || count == 0 {
            return Err(INVALID_VALUE);
        }
        machine.state.lock().batches.push(count);
        let machine = Arc::clone(machine);
        stream.push_copy(move |clock| {
            // In any order.
            for i in (0..count).rev() {
                *clock += engine_seconds(&machine, to[i], bytes[i] as u64);
                machine.copy_in_batch(to[i], from[i], bytes[i] as u64);
            }
        });
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuModuleLoadData(to: *mut Handle, text: *const c_void) -> c_int {
    call("cuModuleLoadData", |machine| {
        // SAFETY: a text that ends with a zero.
        let text = unsafe { CStr::from_ptr(text.cast()) }.to_str();
        let text = text.map_err(|_| INVALID_PTX)?.to_owned();
        make(machine, to, Thing::Module(Arc::new(text)))
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuModuleUnload(handle: Handle) -> c_int {
    call("cuModuleUnload", |machine| {
        machine.synchronize();
        destroy(machine, handle).map(drop)
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuModuleGetFunction(
    to: *mut Handle,
    module: Handle,
    name: *const c_char,
) -> c_int {
    call("cuModuleGetFunction", |machine| {
        let Some(Thing::Module(text)) = things(|all| all.get(&module.0.addr()).cloned()) else {
            return Err(INVALID_HANDLE);
        };
        // SAFETY: a text that ends with a zero.
        let name = unsafe { CStr::from_ptr(name) }.to_str();
        let program = Program::read(&text, name.map_err(|_| NOT_FOUND)?).map_err(|why| {
            machine.offence(why);
            NOT_FOUND
        })?;
        give(to, as_handle(handle_of(Thing::Function(Arc::new(program)))));
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuLaunchKernel(
    function: Handle,
    blocks: c_uint,
    _blocks_y: c_uint,
    _blocks_z: c_uint,
    threads: c_uint,
    _threads_y: c_uint,
    _threads_z: c_uint,
    _shared: c_uint,
    on: Handle,
    arguments: *mut *mut c_void,
    _extra: *mut *mut c_void,
) -> c_int {
    call("cuLaunchKernel", |machine| {
        let Some(Thing::Function(program)) = things(|all| all.get(&function.0.addr()).cloned())
        else {
            return Err(INVALID_HANDLE);
        };
        let stream = stream(machine, on)?;
        // The parameters are read when the kernel is started, as the driver does.
        let parameters: Vec<u64> = (program.parameters.iter().enumerate())
            .map(|(index, &bytes)| {
                let mut value = [0_u8; 8];
                // SAFETY: an array of pointers to values of the parameters' types.
                unsafe {
                    let from = (*arguments.add(index)).cast::<u8>();
                    std::ptr::copy_nonoverlapping(from, value.as_mut_ptr(), bytes);
                }
                u64::from_le_bytes(value)
            })
            .collect();
        let shape = Shape { blocks, threads };
        let is_gather = parameters[2] == 0;
        let mut state = machine.state.lock();
        state.launches.push((blocks, 1 << parameters[3]));
        let seed = state.calls.len() as u64 * 0x9e37_79b9;
        let costs = state.costs;
        drop(state);
        let machine = Arc::clone(machine);
        stream.push_copy(move |clock| {
            if machine.state.lock().lost.is_some() {
                return;
            }
            match machine.run(&program, shape, &parameters, seed) {
                Ok(stored) => {
                    if let Some((gather, scatter)) = costs {
                        let costs = if is_gather { gather } else { scatter };
                        *clock += costs.kernel_start + costs.kernel_byte * stored as f64;
                    }
                }
                Err(code) => machine.lose(code, format!("the kernel failed: {code}")),
            }
        });
        Ok(())
    })
}

/// The address of a call of the driver by its name, or that there is none.
///
/// # Errors
///
/// The stand-in does not know the name.
pub fn find(name: &CStr) -> Result<*mut c_void, String> {
    macro_rules! among {
        ($($entry:ident)*) => {
            match name.to_str().unwrap_or_default() {
                $(stringify!($entry) => Ok($entry as *const () as *mut c_void),)*
                other => Err(format!("no {other}")),
            }
        };
    }
    among! {
        cuInit
        cuGetErrorName
        cuDeviceGet
        cuDeviceGetAttribute
        cuDevicePrimaryCtxRetain
        cuDevicePrimaryCtxRelease_v2
        cuCtxPushCurrent_v2
        cuCtxPopCurrent_v2
        cuThreadExchangeStreamCaptureMode
        cuCtxGetStreamPriorityRange
        cuStreamCreateWithPriority
        cuStreamDestroy_v2
        cuStreamSynchronize
        cuEventCreate
        cuEventDestroy_v2
        cuEventRecord
        cuEventSynchronize
        cuEventElapsedTime
        cuMemcpyDtoHAsync_v2
        cuMemcpyHtoDAsync_v2
        cuMemcpyBatchAsync
        cuMemHostRegister_v2
        cuMemHostUnregister
        cuMemHostAlloc
        cuMemFreeHost
        cuMemAlloc_v2
        cuMemFree_v2
        cuPointerGetAttribute
        cuModuleLoadData
        cuModuleUnload
        cuModuleGetFunction
        cuLaunchKernel
        cuLaunchHostFunc
        cuEventQuery
    }
}
