//! Panics: caught, counted by place, told once.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, PanicHookInfo, catch_unwind, set_hook, take_hook};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};
use std::time::Duration;

/// The variable that says what a panic does. With `abort`, it ends the process.
pub const STRICT: &str = "PENSTOCK_PANICS";

/// What the message of a panic has that a test asked for.
pub const ON_PURPOSE: &str = "on purpose";

/// The longest pause before a thread that panicked begins again.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
const FIRST_PAUSE: Duration = Duration::from_millis(10);

/// The panics of one place since the process began.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Panics {
    /// What panicked: a lane, a thread.
    pub place: &'static str,
    /// How often.
    pub count: u64,
    /// The last one's message, and the line of code.
    pub last: String,
}

/// What was seen so far in this process.
#[derive(Default)]
struct Seen {
    by_place: BTreeMap<&'static str, (u64, String)>,
    /// Lines of code whose panic was written to standard error.
    told: BTreeSet<String>,
}

static SEEN: Mutex<Seen> = Mutex::new(Seen {
    by_place: BTreeMap::new(),
    told: BTreeSet::new(),
});

thread_local! {
    /// How many calls of [`contain`] this thread is in.
    static DEPTH: Cell<usize> = const { Cell::new(0) };
    /// What the last panic of this thread said.
    static LAST: RefCell<String> = const { RefCell::new(String::new()) };
}

fn seen() -> MutexGuard<'static, Seen> {
    SEEN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs work. If it panics, this is counted for `place`, and `None` returned.
///
/// Whatever the work was changing is left half done: it must own that, or nobody may see it
/// afterwards. Standard error has each line's first panic.
pub fn contain<T>(place: &'static str, work: impl FnOnce() -> T) -> Option<T> {
    install();
    DEPTH.set(DEPTH.get() + 1);
    let done = catch_unwind(AssertUnwindSafe(work));
    DEPTH.set(DEPTH.get() - 1);
    match done {
        Ok(value) => Some(value),
        Err(_) => {
            let last = LAST.take();
            let seen = &mut *seen();
            let (count, what) = seen.by_place.entry(place).or_default();
            *count += 1;
            *what = last;
            None
        }
    }
}

/// Runs a thread's work until it returns. If it panics, it begins again, after a pause that grows.
/// `pause` waits for so long, and says whether to begin again.
pub fn serve(place: &'static str, pause: impl Fn(Duration) -> bool, mut work: impl FnMut()) {
    let mut next = FIRST_PAUSE;
    while contain(place, &mut work).is_none() {
        if !pause(next) {
            return;
        }
        next = (next * 2).min(LONGEST_PAUSE);
    }
}

/// Every place that has panicked, by name.
pub fn panics() -> Vec<Panics> {
    let seen = seen();
    let panics = seen.by_place.iter().map(|(&place, (count, last))| Panics {
        place,
        count: *count,
        last: last.clone(),
    });
    panics.collect()
}

/// Has panics of contained work noted. Others are told as they were before.
fn install() {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        let tell = take_hook();
        let is_strict = std::env::var_os(STRICT).is_some_and(|wanted| wanted == "abort");
        set_hook(Box::new(move |info| {
            if DEPTH.get() == 0 {
                return tell(info);
            }
            let (message, line) = (message(info), line(info));
            let is_asked_for = message.contains(ON_PURPOSE);
            let is_first = seen().told.insert(line.clone());
            if is_first && !is_asked_for {
                tell(info);
            }
            if is_strict && !is_asked_for {
                eprintln!("{STRICT}=abort: the process ends, as nobody asked for this panic");
                std::process::abort();
            }
            LAST.set(format!("{message} ({line})"));
        }));
    });
}

fn message(info: &PanicHookInfo<'_>) -> String {
    let payload = info.payload();
    let text = (payload.downcast_ref::<&str>().copied())
        .or_else(|| payload.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message");
    // The first line says what; the rest may be as long as a value.
    text.lines()
        .next()
        .unwrap_or_default()
        .chars()
        .take(200)
        .collect()
}

fn line(info: &PanicHookInfo<'_>) -> String {
    info.location()
        .map_or_else(String::new, |at| format!("{}:{}", at.file(), at.line()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(place: &str) -> Option<Panics> {
        panics().into_iter().find(|panics| panics.place == place)
    }

    #[test]
    fn a_panic_is_counted_where_it_was_and_work_goes_on() {
        assert_eq!(contain("test-counted", || 7), Some(7));
        assert_eq!(of("test-counted"), None);
        for round in 1..4 {
            let nothing: Option<()> =
                contain("test-counted", || panic!("{ON_PURPOSE} {round}\nlong"));
            assert_eq!(nothing, None);
            let seen = of("test-counted").unwrap();
            assert_eq!(seen.count, round);
            assert!(
                seen.last.starts_with(&format!("{ON_PURPOSE} {round} (")),
                "{seen:?}"
            );
            assert!(seen.last.contains("contain.rs:"), "{seen:?}");
        }
        assert_eq!(contain("test-counted", || 8), Some(8));
    }

    #[test]
    fn a_panic_inside_is_of_the_inner_place() {
        let outer = contain("test-outer", || {
            let inner: Option<()> = contain("test-inner", || panic!("{ON_PURPOSE}"));
            inner.is_none()
        });
        assert_eq!(outer, Some(true));
        assert_eq!(
            (of("test-outer"), of("test-inner").unwrap().count),
            (None, 1)
        );
    }

    #[test]
    fn a_thread_begins_again_after_longer_and_longer_pauses() {
        let pauses = RefCell::new(Vec::new());
        let mut left = 12;
        serve(
            "test-again",
            |pause| {
                pauses.borrow_mut().push(pause);
                true
            },
            || {
                left -= 1;
                assert!(left == 0, "{ON_PURPOSE}");
            },
        );
        let pauses = pauses.into_inner();
        assert_eq!(of("test-again").unwrap().count, 11);
        assert_eq!((pauses[0], pauses[1]), (FIRST_PAUSE, 2 * FIRST_PAUSE));
        assert_eq!(pauses[10], LONGEST_PAUSE);
    }

    #[test]
    fn a_thread_that_is_told_to_end_does_not_begin_again() {
        let mut runs = 0;
        serve(
            "test-ends",
            |_| false,
            || {
                runs += 1;
                panic!("{ON_PURPOSE}");
            },
        );
        assert_eq!(runs, 1);
    }

    /// The test runs itself in a process with the variable.
    #[test]
    fn a_panic_that_nobody_asked_for_ends_a_strict_process() {
        const NAME: &str = "contain::tests::a_panic_that_nobody_asked_for_ends_a_strict_process";
        const MESSAGE: &str = "PENSTOCK_TEST_MESSAGE";
        if let Ok(message) = std::env::var(MESSAGE) {
            let _: Option<()> = contain("test-strict", || panic!("{message}"));
            return;
        }
        for (message, is_fine) in [("unasked", false), (ON_PURPOSE, true)] {
            let status = std::process::Command::new(std::env::current_exe().unwrap())
                .args([NAME, "--exact", "--nocapture"])
                .env(STRICT, "abort")
                .env(MESSAGE, message)
                .output()
                .unwrap();
            assert_eq!(status.status.success(), is_fine, "{status:?}");
        }
    }
}
