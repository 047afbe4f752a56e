//! Waits that the caller may end early.
//!
//! Some operations run for a person, who may press Ctrl-C. Their caller uses [`interruptible`] to
//! give its thread a function that says whether the operation is to end. When the operation then
//! waits on that thread, for a socket or for another thread, it calls this function ten times a
//! second, and whenever a signal wakes it up. Once the answer is yes, all waits of the operation
//! end as if its deadline had come. The work under way is given up. The operation has then
//! returned, so everything that it borrowed is free again. Threads without such a function wait as
//! usual.

use std::cell::Cell;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, MutexGuard};

/// The time between two looks.
const BETWEEN_LOOKS: Duration = Duration::from_millis(100);

#[derive(Clone, Copy)]
struct Interruption {
    ask: fn() -> bool,
    /// The answer was yes: the function is not called again.
    has_come: bool,
}

thread_local! {
    static CURRENT: Cell<Option<Interruption>> = const { Cell::new(None) };
}

/// Runs `work`. Its waits on this thread end early once `ask` answers true. No lock is held when
/// `ask` is called.
pub fn interruptible<T>(ask: fn() -> bool, work: impl FnOnce() -> T) -> T {
    struct Before(Option<Interruption>);
    impl Drop for Before {
        fn drop(&mut self) {
            CURRENT.set(self.0);
        }
    }
    let has_come = false;
    let _before = Before(CURRENT.replace(Some(Interruption { ask, has_come })));
    work()
}

/// Asks whether the work on this thread is to end.
pub fn is_interrupted() -> bool {
    let Some(current) = CURRENT.get() else {
        return false;
    };
    // `ask` may run other interruptible work, which leaves `CURRENT` as it found it.
    let has_come = current.has_come || (current.ask)();
    CURRENT.set(Some(Interruption {
        has_come,
        ..current
    }));
    has_come
}

/// Until when a thread may wait before it has to ask again: at the latest, `deadline`.
pub fn next_look(deadline: Instant) -> Instant {
    match CURRENT.get() {
        Some(_) => deadline.min(Instant::now() + BETWEEN_LOOKS),
        None => deadline,
    }
}

/// Waits on a condition variable, as [`Condvar::wait_until`]. Returns true if the time is over or
/// the wait is interrupted. The lock may have been released meanwhile. So look again at what you
/// wait for, as after any wake-up.
pub fn wait_until<T>(condvar: &Condvar, guard: &mut MutexGuard<'_, T>, deadline: Instant) -> bool {
    let look = next_look(deadline);
    condvar.wait_until(guard, look).timed_out()
        && (MutexGuard::unlocked(guard, is_interrupted) || look == deadline)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use parking_lot::Mutex;

    use super::*;

    /// Whoever waited for that would be ended by the runner.
    const FAR: Duration = Duration::from_secs(3600);

    fn wait_for_nothing(deadline: Instant) {
        let (lock, condvar) = (Mutex::new(()), Condvar::new());
        let mut guard = lock.lock();
        while !wait_until(&condvar, &mut guard, deadline) {}
    }

    #[test]
    fn a_wait_ends_once_the_answer_is_yes_and_so_do_those_after_it() {
        static ASKED: AtomicUsize = AtomicUsize::new(0);
        let far = Instant::now() + FAR;
        interruptible(
            || ASKED.fetch_add(1, Ordering::Relaxed) == 2,
            || {
                wait_for_nothing(far);
                assert!(is_interrupted());
                wait_for_nothing(far);
            },
        );
        assert_eq!(ASKED.load(Ordering::Relaxed), 3);
        // The interruption belonged to that work, and to nothing after it.
        assert!(!is_interrupted());
    }

    #[test]
    fn the_deadline_holds_where_nobody_interrupts() {
        let deadline = Instant::now() + Duration::from_millis(150);
        interruptible(|| false, || wait_for_nothing(deadline));
        assert!(Instant::now() >= deadline);
        wait_for_nothing(Instant::now() + Duration::from_millis(10));
    }

    #[test]
    fn other_threads_are_not_interrupted() {
        interruptible(
            || true,
            || {
                std::thread::spawn(|| assert!(!is_interrupted()))
                    .join()
                    .unwrap()
            },
        );
    }

    #[test]
    fn work_of_whoever_is_asked_has_its_own() {
        fn asked() -> bool {
            assert!(interruptible(|| true, is_interrupted));
            false
        }
        interruptible(asked, || {
            assert!(!is_interrupted());
            assert!(!is_interrupted());
        });
    }
}
