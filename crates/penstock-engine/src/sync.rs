//! Locks and shared values for the parts whose interleavings a model checker explores.

#[cfg(not(loom))]
pub(crate) use parking_lot::{Condvar, Mutex};
/// For waits of the engine's callers. The engine's own threads are not interrupted.
#[cfg(not(loom))]
pub(crate) use penstock_value::interrupt::wait_until;
/// An `Arc` whose last drop has an effect that other threads see.
#[cfg(not(loom))]
pub(crate) use std::sync::Arc as Shared;

#[cfg(loom)]
pub(crate) use loom::sync::Arc as Shared;
#[cfg(loom)]
pub(crate) use model::{Condvar, Mutex, wait_until};

/// The model checker's locks under the names and signatures of `parking_lot`.
#[cfg(loom)]
mod model {
    use std::ops::{Deref, DerefMut};
    use std::time::Instant;

    #[derive(Default)]
    pub(crate) struct Mutex<T>(loom::sync::Mutex<T>);

    /// Empty only while it waits.
    pub(crate) struct MutexGuard<'m, T>(Option<loom::sync::MutexGuard<'m, T>>);

    impl<T> Mutex<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(loom::sync::Mutex::new(value))
        }

        pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
            MutexGuard(Some(self.0.lock().unwrap()))
        }
    }

    impl<T> Deref for MutexGuard<'_, T> {
        type Target = T;

        fn deref(&self) -> &T {
            self.0.as_ref().unwrap()
        }
    }

    impl<T> DerefMut for MutexGuard<'_, T> {
        fn deref_mut(&mut self) -> &mut T {
            self.0.as_mut().unwrap()
        }
    }

    #[derive(Default)]
    pub(crate) struct Condvar(loom::sync::Condvar);

    /// A model has no time: nothing times out, and a lost wake-up is a deadlock.
    pub(crate) struct NeverTimedOut;

    impl NeverTimedOut {
        pub(crate) fn timed_out(&self) -> bool {
            false
        }
    }

    /// Nobody interrupts in a model.
    pub(crate) fn wait_until<T>(
        condvar: &Condvar,
        guard: &mut MutexGuard<'_, T>,
        until: Instant,
    ) -> bool {
        condvar.wait_until(guard, until).timed_out()
    }

    impl Condvar {
        pub(crate) fn new() -> Self {
            Self::default()
        }

        pub(crate) fn notify_one(&self) {
            self.0.notify_one();
        }

        pub(crate) fn notify_all(&self) {
            self.0.notify_all();
        }

        pub(crate) fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
            guard.0 = Some(self.0.wait(guard.0.take().unwrap()).unwrap());
        }

        pub(crate) fn wait_until<T>(
            &self,
            guard: &mut MutexGuard<'_, T>,
            _until: Instant,
        ) -> NeverTimedOut {
            self.wait(guard);
            NeverTimedOut
        }
    }
}
