//! Order with what the model does, by events.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use penstock_layout::KvLayout;

use super::super::CudaExecutor;
use super::entries::record;
use super::machine::{Event, Machine, Stream, Thing, handle_of};
use super::{Cache, Payload, Sizes};

/// Small pieces, for the kernel, and large ones.
const CONTENTS: [u64; 2] = [256, 65_536];

/// The model's stream, and its event.
fn model() -> (Arc<Stream>, Arc<Event>, u64) {
    let event = Arc::new(Event::default());
    let handle = handle_of(Thing::Event(Arc::clone(&event)));
    (Stream::new(), event, handle as u64)
}

fn cache(machine: &Arc<Machine>, content: u64) -> Arc<Cache> {
    let sizes = Sizes {
        layers: 2,
        blocks: 3,
        heads: 1,
        tokens: 1,
        content,
    };
    Arc::new(Cache::new(machine, KvLayout::LBHNC, sizes, 1))
}

#[test]
fn a_gather_reads_what_the_model_wrote_before_the_event() {
    for (content, pinned) in [
        (CONTENTS[0], true),
        (CONTENTS[1], true),
        (CONTENTS[1], false),
    ] {
        let machine = Machine::new();
        let cache = cache(&machine, content);
        let executor = CudaExecutor::of(machine.ordinal).unwrap();
        let (stream, event, after) = model();
        let writes = Arc::clone(&cache);
        stream.push(move |_| {
            std::thread::sleep(Duration::from_millis(30));
            writes.memory.fill(2);
        });
        record(&event, &stream);
        let mut payload = Payload::new(&machine, 2 * content as usize, 0, pinned);
        cache
            .gather(&executor, &[1], &cache.whole(), payload.bytes(), after)
            .unwrap();
        let written = super::pattern(cache.memory.len(), 2);
        let places = cache.places(&[1], &cache.whole());
        assert!(
            places
                .iter()
                .map(|&at| written[at])
                .eq(payload.bytes().iter().copied())
        );
        stream.close();
    }
}

#[test]
fn a_scatter_writes_after_what_the_model_read_before_the_event() {
    for (content, pinned) in [
        (CONTENTS[0], true),
        (CONTENTS[1], true),
        (CONTENTS[1], false),
    ] {
        let machine = Machine::new();
        let cache = cache(&machine, content);
        let before = cache.memory.read();
        let executor = CudaExecutor::of(machine.ordinal).unwrap();
        let (stream, event, after) = model();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let (reads, into) = (Arc::clone(&cache), Arc::clone(&seen));
        stream.push(move |_| {
            std::thread::sleep(Duration::from_millis(30));
            *into.lock() = reads.memory.read();
        });
        record(&event, &stream);
        let mut payload = Payload::new(&machine, 2 * content as usize, 0, pinned);
        payload.bytes().fill(0xa5);
        cache
            .scatter(&executor, &[1], &cache.whole(), payload.bytes(), after)
            .unwrap();
        // Done when it has returned, and not before the model was.
        let places = cache.places(&[1], &cache.whole());
        let now = cache.memory.read();
        assert!(places.iter().all(|&at| now[at] == 0xa5));
        assert!(*seen.lock() == before);
        stream.close();
    }
}
