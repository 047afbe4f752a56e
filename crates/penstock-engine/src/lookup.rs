//! Look-ups: ask a store which chunks it has, without waiting for the answer.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};
use penstock_contract::{Chunk, ErrorKind, Key, Namespace, Store};
use penstock_layout::Span;
use penstock_threads::contain;
use penstock_value::interrupt;

use crate::EngineError;
use crate::config::end_of;
use crate::gauge::Gauge;

/// Where panics of these threads are counted.
const PLACE: &str = "penstock-look";
/// Time given to a store that answers at once.
const NOW: Duration = Duration::from_secs(1);

/// Bounds of a [`Lookup`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LookupConfig {
    /// Threads that ask the store.
    pub threads: usize,
    /// The most look-ups that wait for a thread. Further ones are answered
    /// [`ErrorKind::Unavailable`] at once.
    pub max_queued: usize,
    /// The most keys in one call to the store; a single look-up may have more. Look-ups that wait
    /// go together.
    pub max_keys: usize,
    /// The most look-ups whose answer has not been taken.
    pub max_outstanding: usize,
}

impl Default for LookupConfig {
    fn default() -> Self {
        Self {
            threads: 2,
            max_queued: 1024,
            max_keys: 8192,
            max_outstanding: 1 << 16,
        }
    }
}

/// For each chunk asked for, in order, whether the store has all its spans.
pub type Answer = Result<Vec<bool>, ErrorKind>;

/// An answer, and the time that passed since it was asked for.
type Answered = (Answer, Duration);

/// Asks a store which chunks it has, on threads of its own.
///
/// The caller chooses the ids. An id may be used again once its answer was taken or it was
/// cancelled. Every look-up is answered by its deadline, whatever the store does. Dropping a
/// `Lookup` ends the threads, once the calls that they are in have returned.
pub struct Lookup {
    inner: Arc<Inner>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

struct Inner {
    store: Arc<dyn Store>,
    config: LookupConfig,
    state: Mutex<State>,
    queued: Condvar,
    answered: Condvar,
    running: Gauge,
    spare: Spare,
}

/// Lists of chunks whose questions are answered, kept for later look-ups. The list of a long prompt
/// has hundreds of kilobytes, and the caller would have to wait for its fresh pages.
#[derive(Default)]
struct Spare(Mutex<Vec<Vec<Chunk>>>);

impl Spare {
    const MOST: usize = 4;

    fn gather(&self, chunks: impl IntoIterator<Item = Chunk>) -> Vec<Chunk> {
        let mut gathered = self.0.lock().pop().unwrap_or_default();
        gathered.extend(chunks);
        gathered
    }

    fn give_back(&self, mut chunks: Vec<Chunk>) {
        chunks.clear();
        let mut spare = self.0.lock();
        if spare.len() < Self::MOST {
            spare.push(chunks);
        }
    }
}

#[derive(Default)]
struct State {
    queue: VecDeque<Request>,
    /// Look-ups without an answer.
    open: HashMap<u64, Open>,
    answers: HashMap<u64, Answered>,
    tickets: u64,
    closed: bool,
}

/// The ticket tells a look-up apart from a later one with the same id.
#[derive(Clone, Copy)]
struct Open {
    ticket: u64,
    asked: Instant,
    deadline: Instant,
}

struct Request {
    id: u64,
    ticket: u64,
    deadline: Instant,
    namespace: Namespace,
    chunks: Vec<Chunk>,
    spans: Vec<Span>,
}

impl Request {
    /// The number of keys that it asks for.
    fn len(&self) -> usize {
        self.chunks.len() * self.spans.len()
    }

    /// The keys. The thread that asks the store makes them: for a long prompt, they are half a
    /// megabyte.
    fn keys(&self) -> impl Iterator<Item = Key> {
        keys(self.namespace, self.chunks.iter().copied(), &self.spans)
    }
}

/// The keys of chunks, one chunk after the other, each with all spans.
fn keys(
    namespace: Namespace,
    chunks: impl Iterator<Item = Chunk>,
    spans: &[Span],
) -> impl Iterator<Item = Key> {
    chunks.flat_map(move |chunk| {
        spans.iter().map(move |&span| Key {
            namespace,
            chunk,
            span,
        })
    })
}

/// For each chunk, in order, whether a store that is this machine's memory has all its spans. Such
/// a store answers at once. If it fails, it has none.
pub fn look_up_now(
    store: &dyn Store,
    namespace: Namespace,
    chunks: impl Iterator<Item = Chunk>,
    spans: &[Span],
) -> Vec<bool> {
    let keys: Vec<Key> = keys(namespace, chunks, spans).collect();
    let found = store.contains(&keys, end_of(NOW));
    let found = found.unwrap_or_default();
    let of_chunks = found.chunks_exact(spans.len().max(1));
    of_chunks
        .map(|spans| spans.iter().all(|&has| has))
        .collect()
}

impl State {
    fn is_open(&self, request: &Request) -> bool {
        self.open
            .get(&request.id)
            .is_some_and(|open| open.ticket == request.ticket)
    }

    fn answer(&mut self, request: &Request, answer: Answer) {
        if self.is_open(request) {
            self.close(request.id, answer);
        }
    }

    fn close(&mut self, id: u64, answer: Answer) {
        if let Some(open) = self.open.remove(&id) {
            self.answers.insert(id, (answer, open.asked.elapsed()));
        }
    }

    fn expire(&mut self, now: Instant) {
        let overdue: Vec<u64> = self
            .open
            .iter()
            .filter(|(_, open)| open.deadline <= now)
            .map(|(&id, _)| id)
            .collect();
        for id in overdue {
            self.close(id, Err(ErrorKind::TimedOut));
            self.queue.retain(|request| request.id != id);
        }
    }
}

impl Lookup {
    /// Starts the threads.
    pub fn new(store: Arc<dyn Store>, config: LookupConfig) -> Result<Self, EngineError> {
        if config.threads == 0 || config.threads > 64 {
            return Err(EngineError::Config("threads must be between 1 and 64"));
        }
        let threads = config.threads;
        let inner = Arc::new(Inner {
            store,
            config,
            state: Mutex::default(),
            queued: Condvar::new(),
            answered: Condvar::new(),
            running: Gauge::default(),
            spare: Spare::default(),
        });
        let lookup = Self {
            inner,
            threads: Mutex::default(),
        };
        for i in 0..threads {
            let inner = Arc::clone(&lookup.inner);
            inner.running.add(1);
            // A failed spawn drops the closure, and the guard with it.
            let running = Running(Arc::clone(&inner));
            let thread = Builder::new()
                .name(format!("penstock-look-{i}"))
                .spawn(move || {
                    let _running = running;
                    penstock_threads::serve(PLACE, |pause| inner.rest(pause), || inner.serve());
                })
                .map_err(EngineError::Thread)?;
            lookup.threads.lock().push(thread);
        }
        Ok(lookup)
    }

    /// Asks for each chunk whether the store has it with every one of `spans`.
    ///
    /// The look-up is refused if there is no span, if `id` is in use, or if too many answers wait
    /// to be taken.
    pub fn submit(
        &self,
        id: u64,
        namespace: Namespace,
        chunks: impl IntoIterator<Item = Chunk>,
        spans: &[Span],
        timeout: Duration,
    ) -> Result<(), EngineError> {
        if spans.is_empty() {
            return Err(EngineError::Config("a look-up needs at least one span"));
        }
        let deadline = end_of(timeout);
        let chunks = self.inner.spare.gather(chunks);
        let mut state = self.inner.state.lock();
        if state.closed {
            return Err(EngineError::Closed);
        }
        if state.open.contains_key(&id) || state.answers.contains_key(&id) {
            return Err(EngineError::outstanding(id));
        }
        let (outstanding, bound) = (
            state.open.len() + state.answers.len() + 1,
            self.inner.config.max_outstanding,
        );
        if outstanding > bound {
            return Err(EngineError::Busy { outstanding, bound });
        }
        let at_once = if chunks.is_empty() {
            Some(Ok(vec![]))
        } else {
            let is_full = state.queue.len() >= self.inner.config.max_queued;
            is_full.then_some(Err(ErrorKind::Unavailable))
        };
        if let Some(answer) = at_once {
            state.answers.insert(id, (answer, Duration::ZERO));
            self.inner.answered.notify_all();
            return Ok(());
        }
        state.tickets += 1;
        let ticket = state.tickets;
        let asked = Instant::now();
        let open = Open {
            ticket,
            asked,
            deadline,
        };
        state.open.insert(id, open);
        state.queue.push_back(Request {
            id,
            ticket,
            deadline,
            namespace,
            chunks,
            spans: spans.to_vec(),
        });
        drop(state);
        self.inner.queued.notify_one();
        Ok(())
    }

    /// Takes all answers that are there, each with the time that it took. Does not wait.
    pub fn poll(&self) -> Vec<(u64, Answer, Duration)> {
        let mut state = self.inner.state.lock();
        state.expire(Instant::now());
        let answers = state.answers.drain();
        answers
            .map(|(id, (answer, took))| (id, answer, took))
            .collect()
    }

    /// Takes the answer of one look-up, if it is there. Does not wait.
    pub fn take(&self, id: u64) -> Option<Answer> {
        let mut state = self.inner.state.lock();
        state.expire(Instant::now());
        state.answers.remove(&id).map(|(answer, _)| answer)
    }

    /// Waits until there is an answer to take (true), or until the time is over (false).
    pub fn wait(&self, timeout: Duration) -> bool {
        let end = end_of(timeout);
        let mut state = self.inner.state.lock();
        loop {
            let now = Instant::now();
            state.expire(now);
            if !state.answers.is_empty() {
                return true;
            }
            if now >= end {
                return false;
            }
            let next = state.open.values().map(|open| open.deadline).min();
            let until = next.map_or(end, |next| next.min(end));
            if interrupt::wait_until(&self.inner.answered, &mut state, until)
                && MutexGuard::unlocked(&mut state, interrupt::is_interrupted)
            {
                return false;
            }
        }
    }

    /// Forgets a look-up, answered or not.
    pub fn cancel(&self, id: u64) {
        let mut state = self.inner.state.lock();
        state.open.remove(&id);
        state.answers.remove(&id);
        state.queue.retain(|request| request.id != id);
    }

    /// Answers [`ErrorKind::Unavailable`] to all open look-ups and ends the threads. Returns true
    /// once no thread is left, and false if one is still inside the store when the time is over.
    /// This may be called again.
    pub fn shutdown(&self, timeout: Duration) -> bool {
        let end = end_of(timeout);
        {
            let mut state = self.inner.state.lock();
            state.closed = true;
            state.queue.clear();
            let open: Vec<u64> = state.open.keys().copied().collect();
            for id in open {
                state.close(id, Err(ErrorKind::Unavailable));
            }
        }
        self.inner.queued.notify_all();
        self.inner.answered.notify_all();
        if !self.inner.running.wait_zero(end) {
            return false;
        }
        for thread in self.threads.lock().drain(..) {
            // Panics are contained. If one escaped all the same, the thread is gone.
            let _ = thread.join();
        }
        true
    }
}

impl Drop for Lookup {
    fn drop(&mut self) {
        self.shutdown(Duration::from_secs(10));
    }
}

struct Running(Arc<Inner>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.running.sub(1);
    }
}

impl Inner {
    /// Waits for so long, unless this is the end. Whether it is not.
    fn rest(&self, pause: Duration) -> bool {
        let mut state = self.state.lock();
        if !state.closed {
            self.queued.wait_for(&mut state, pause);
        }
        !state.closed
    }

    fn serve(&self) {
        while let Some(batch) = self.next() {
            let keys: Vec<Key> = batch.iter().flat_map(Request::keys).collect();
            let Some(earliest) = batch.iter().map(|request| request.deadline).min() else {
                continue;
            };
            let asked = contain(PLACE, || self.store.contains(&keys, earliest));
            let found = match asked {
                Some(Ok(found)) if found.len() == keys.len() => Ok(found),
                Some(Err(error)) => Err(error.kind()),
                Some(Ok(_)) | None => Err(ErrorKind::Internal),
            };
            self.settle(batch, earliest, found);
        }
    }

    /// Waits for look-ups and takes all that wait, up to the bound on keys.
    fn next(&self) -> Option<Vec<Request>> {
        let mut state = self.state.lock();
        loop {
            if state.closed {
                return None;
            }
            let mut batch: Vec<Request> = Vec::new();
            let mut keys = 0;
            while let Some(next) = state.queue.front() {
                keys += next.len();
                if !batch.is_empty() && keys > self.config.max_keys {
                    break;
                }
                batch.extend(state.queue.pop_front());
            }
            if !batch.is_empty() {
                return Some(batch);
            }
            self.queued.wait(&mut state);
        }
    }

    fn settle(&self, batch: Vec<Request>, earliest: Instant, found: Result<Vec<bool>, ErrorKind>) {
        let now = Instant::now();
        let mut state = self.state.lock();
        match found {
            Ok(found) => {
                let mut found = found.as_slice();
                for request in batch {
                    let (own, rest) = found.split_at(request.len());
                    found = rest;
                    let chunks = own
                        .chunks(request.spans.len())
                        .map(|spans| spans.iter().all(|&has| has));
                    state.answer(&request, Ok(chunks.collect()));
                    self.spare.give_back(request.chunks);
                }
            }
            Err(kind) => {
                for request in batch.into_iter().rev() {
                    // Only the most impatient request set this deadline; the others have time left.
                    let has_time = request.deadline > earliest.max(now);
                    if kind == ErrorKind::TimedOut && has_time && state.is_open(&request) {
                        state.queue.push_front(request);
                    } else {
                        state.answer(&request, Err(kind));
                    }
                }
            }
        }
        let again = !state.queue.is_empty();
        drop(state);
        self.answered.notify_all();
        if again {
            self.queued.notify_one();
        }
    }
}
