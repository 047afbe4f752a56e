//! Waits that somebody may end early.
//!
//! Whoever runs an operation for a person, who may press Ctrl-C, says for his thread how to ask
//! whether it is to end ([`interruptible`]). Wherever the operation then waits on that thread, for a
//! socket or for another thread, it asks ten times a second, and when a signal wakes it up. Once the
//! answer is yes, all waits of the operation end as if its deadline had come: what was under way is
//! given up, and everything that it borrowed is free again, since it has returned. Threads on which
//! nobody can interrupt wait as ever.

use std::cell::Cell;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, MutexGuard};

/// Between two looks.
const BETWEEN_LOOKS: Duration = Duration::from_millis(100);

#[derive(Clone, Copy)]
struct Interruption {
    ask: fn() -> bool,
    /// The answer was yes: nobody is asked again.
    has_come: bool,
}

thread_local! {
    static CURRENT: Cell<Option<Interruption>> = const { Cell::new(None) };
}

/// Runs `work`, whose waits on this thread end early once `ask` answers true. No lock is held when it
/// is asked.
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

/// Asks whether what runs on this thread is to end.
pub fn is_interrupted() -> bool {
    let Some(current) = CURRENT.get() else {
        return false;
    };
    // Whoever is asked may run other interruptible work, which leaves `CURRENT` as it found it.
    let has_come = current.has_come || (current.ask)();
    CURRENT.set(Some(Interruption {
        has_come,
        ..current
    }));
    has_come
}

/// Until when a thread may wait before it has to ask again, `deadline` at the latest.
pub fn next_look(deadline: Instant) -> Instant {
    match CURRENT.get() {
        Some(_) => deadline.min(Instant::now() + BETWEEN_LOOKS),
        None => deadline,
    }
}

/// Waits on a condition variable, as [`Condvar::wait_until`]; true if the time is over or the wait is
/// interrupted. The lock may have been released meanwhile: as after any wake-up, look again at
/// what is waited for.
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

    const FAR: Duration = Duration::from_secs(30);

    fn wait_for_nothing(deadline: Instant) {
        let (lock, condvar) = (Mutex::new(()), Condvar::new());
        let mut guard = lock.lock();
        while !wait_until(&condvar, &mut guard, deadline) {}
    }

    #[test]
    fn a_wait_ends_once_the_answer_is_yes_and_so_do_those_after_it() {
        static ASKED: AtomicUsize = AtomicUsize::new(0);
        let begin = Instant::now();
        interruptible(
            || ASKED.fetch_add(1, Ordering::Relaxed) == 2,
            || {
                wait_for_nothing(begin + FAR);
                assert!(is_interrupted());
                wait_for_nothing(begin + FAR);
            },
        );
        assert_eq!(ASKED.load(Ordering::Relaxed), 3);
        assert!(begin.elapsed() < FAR / 2);
        // It was that work's, and nobody's after it.
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
