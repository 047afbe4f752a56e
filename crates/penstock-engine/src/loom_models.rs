//! Models of the arena's slots: who holds one, who waits for one, what the host tier gives up.
//!
//! A cell of the model checker stands for all bytes of a slot. The checker fails if one thread
//! touches the cell while another does, or before it can know that the other is done. There is no
//! time: a wait that nobody ends is a deadlock, and fails too.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use loom::cell::UnsafeCell;
use loom::thread;
use penstock_contract::{Key, Namespace};
use penstock_layout::{Descriptor, KvLayout, Span};
use penstock_value::compare::Content;
use penstock_value::header::{Checksum, Writer};

use crate::arena::{Arena, Empty, Purpose, Slot, Verified};
use crate::completion::Completions;
use crate::fence::{Fence, Mark, Passage};
use crate::job::{Deadline, Plan, Transfer};
use crate::load_job::{Aim, LoadJob, LoadSpec};
use crate::outcome::Part;
use crate::queue::{CopyWork, Payload, Put, PutWork, Queues};
use crate::registration::Registration;
use crate::signal::Signals;
use crate::store_job::{StoreAim, StoreJob};
use crate::sync::Shared;
use crate::{Device, EngineConfig, Event, Outcome, Region};

const BYTES: usize = 64;

/// All interleavings of three threads would take hours; faults need only a few switches. With
/// `LOOM_MAX_PREEMPTIONS=3` it takes ten times as long as with two.
fn check_three(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = builder.preemption_bound.or(Some(2));
    builder.check(model);
}

/// An object of the only size, by its number.
#[allow(unsafe_code)]
fn transfer(number: u8) -> Transfer {
    static REGISTRATION: OnceLock<Arc<Registration>> = OnceLock::new();
    let span = Span::new(0..1, 0..1).unwrap();
    let registration = REGISTRATION.get_or_init(|| {
        let layout = KvLayout::BLHNC;
        let descriptor = Descriptor::packed(layout, span, 1, 1, BYTES as u64).unwrap();
        // SAFETY: the models copy nothing to or from it.
        let region = unsafe { Region::new(0, BYTES as u64) };
        let executor = Device::Host.executor().unwrap();
        Arc::new(Registration::new(descriptor, vec![region], executor).unwrap())
    });
    Transfer {
        registration: Arc::clone(registration),
        key: Key {
            namespace: Namespace([0; 16]),
            chunk: [number; 32],
            span,
        },
        parent: None,
        position: 0,
        pages: 0..1,
        context: Arc::default(),
        bytes: BYTES,
        element: None,
        content: Content {
            numbers: None,
            pages: 1,
            layers: 1,
            is_first: false,
        },
        writer: Writer::UNKNOWN,
    }
}

/// Block 1, in one object.
fn one_object() -> Plan {
    Plan {
        objects: vec![transfer(1)],
        parts: vec![Part {
            end: 1,
            bytes: BYTES as u64,
        }],
    }
}

/// Job 1, which stores block 1.
fn store_one(completions: &Arc<Completions>, fence: Fence) -> Arc<StoreJob> {
    let completions = Arc::clone(completions);
    StoreJob::new(
        1,
        one_object(),
        StoreAim::Usual,
        fence,
        completions,
        Arc::default(),
        Arc::default(),
    )
}

/// A slot's bytes, as the model checker watches them.
struct Watched {
    address: *const u8,
    bytes: UnsafeCell<()>,
}

/// An arena, the host tier and the queues, without lanes.
struct House {
    queues: Queues,
    signals: Arc<Signals>,
    slots: Vec<Watched>,
}

// SAFETY: the addresses are only compared, and whether the cells are touched by one thread at a
// time is what the models are there to find out: the checker fails if not.
#[allow(unsafe_code)]
unsafe impl Send for House {}
// SAFETY: as above.
#[allow(unsafe_code)]
unsafe impl Sync for House {}

impl House {
    /// A house with so many slots, of which up to `prefetch_slots` may be pinned.
    fn new(slots: usize, prefetch_slots: usize) -> Shared<Self> {
        let mut config = EngineConfig::new(BYTES, slots);
        config.prefetch_slots = prefetch_slots;
        config.store_wait = Duration::from_secs(3600);
        let signals = Arc::new(Signals::default());
        let arena = Arc::new(Arena::new(&config, Arc::clone(&signals), Arc::default()).unwrap());
        let batches = config.batches(penstock_contract::BatchBytes::default());
        let queues = Queues::new(config, batches, false, arena, Arc::clone(&signals));
        let mut all: Vec<_> = (0..slots)
            .map(|_| queues.lease(Purpose::Load).unwrap())
            .collect();
        let slots = all
            .iter_mut()
            .map(|slot| Watched {
                address: slot.payload_mut(BYTES).as_ptr(),
                bytes: UnsafeCell::new(()),
            })
            .collect();
        drop(all);
        Shared::new(Self {
            queues,
            signals,
            slots,
        })
    }

    fn watched(&self, payload: &[u8]) -> &UnsafeCell<()> {
        let is_it = |slot: &&Watched| slot.address == payload.as_ptr();
        &self.slots.iter().find(is_it).unwrap().bytes
    }

    fn write(&self, slot: &mut Slot<Empty>) {
        self.watched(slot.payload_mut(BYTES)).with_mut(|_| ());
    }

    fn read(&self, slot: &Slot<Verified>) {
        self.watched(slot.payload()).with(|_| ());
    }

    /// Waits for a slot as a lane does.
    fn lend(&self, purpose: Purpose) -> Slot<Empty> {
        let signal = match purpose {
            Purpose::Store => &self.signals.copy,
            Purpose::Load | Purpose::Prefetch | Purpose::Keep => &self.signals.get,
        };
        loop {
            let seen = signal.generation();
            match self.queues.lease(purpose) {
                Some(slot) => return slot,
                None => signal.wait(seen, None),
            }
        }
    }

    /// Waits for a slot, and uses it.
    fn use_one(&self, purpose: Purpose) {
        self.write(&mut self.lend(purpose));
    }

    fn fill(&self, mut slot: Slot<Empty>, transfer: &Transfer) -> Slot<Verified> {
        self.write(&mut slot);
        slot.gathered(transfer, Checksum::of(&[]))
            .into_verified(transfer)
    }

    /// Keeps a value, unless the host tier is closed.
    fn keep(&self, slot: Slot<Empty>, number: u8) {
        let transfer = transfer(number);
        let slot = self.fill(slot, &transfer);
        let host_tier = self.queues.host_tier();
        host_tier.want(std::slice::from_ref(&transfer));
        host_tier.keep(&transfer, slot, None);
    }
}

#[test]
fn a_slot_is_lent_to_one_at_a_time_and_whoever_waits_gets_it() {
    check_three(|| {
        let house = House::new(1, 0);
        let lanes: Vec<_> = [Purpose::Store, Purpose::Load]
            .into_iter()
            .map(|purpose| {
                let house = Shared::clone(&house);
                thread::spawn(move || house.use_one(purpose))
            })
            .collect();
        house.use_one(Purpose::Load);
        lanes.into_iter().for_each(|lane| lane.join().unwrap());
    });
}

#[test]
fn a_value_that_is_read_keeps_its_slot_when_it_is_given_up() {
    loom::model(|| {
        let house = House::new(1, 0);
        house.keep(house.lend(Purpose::Load), 1);
        let taker = thread::spawn({
            let house = Shared::clone(&house);
            move || house.use_one(Purpose::Load)
        });
        for value in house
            .queues
            .host_tier()
            .find(&[transfer(1)])
            .iter()
            .flatten()
        {
            house.read(value);
        }
        taker.join().unwrap();
        assert!(house.queues.host_tier().find(&[transfer(1)])[0].is_none());
    });
}

#[test]
fn a_pinned_value_is_not_given_up_before_it_is_released() {
    loom::model(|| {
        let house = House::new(2, 1);
        house.keep(house.lend(Purpose::Load), 1);
        let taker = thread::spawn({
            let house = Shared::clone(&house);
            move || {
                // All slots that can be had without waiting, as get lanes take them.
                let mut slots = vec![house.lend(Purpose::Load)];
                slots.extend(house.queues.lease(Purpose::Load));
                slots.iter_mut().for_each(|slot| house.write(slot));
            }
        });
        let host_tier = house.queues.host_tier();
        let is_pinned = host_tier.open(7, &[transfer(1)])[0].is_some();
        if is_pinned {
            assert_eq!(host_tier.room(), 0);
            let value = host_tier.find(&[transfer(1)])[0].take();
            house.read(&value.expect("it is pinned"));
        }
        host_tier.release(7);
        assert_eq!(host_tier.room(), 1);
        taker.join().unwrap();
    });
}

#[test]
fn who_waits_for_a_slot_gets_that_of_a_value_just_kept() {
    check_three(|| {
        let house = House::new(1, 0);
        let slot = house.lend(Purpose::Store);
        let waiting = [Purpose::Load, Purpose::Store].map(|purpose| {
            let house = Shared::clone(&house);
            thread::spawn(move || house.use_one(purpose))
        });
        house.keep(slot, 1);
        waiting.into_iter().for_each(|lane| lane.join().unwrap());
    });
}

#[test]
fn a_value_kept_while_the_host_tier_closes_gives_its_slot_back() {
    loom::model(|| {
        let house = House::new(1, 0);
        let slot = house.lend(Purpose::Load);
        let lane = thread::spawn({
            let house = Shared::clone(&house);
            move || house.keep(slot, 1)
        });
        house.queues.host_tier().close();
        lane.join().unwrap();
        assert!(
            !house.queues.host_tier().evict(),
            "nothing is kept any more"
        );
        assert!(house.queues.lease(Purpose::Load).is_some());
    });
}

#[test]
fn an_object_is_gathered_once_there_is_a_slot_or_cancelled_and_has_one_outcome() {
    check_three(|| {
        let house = House::new(2, 0);
        let completions = Arc::new(Completions::default());
        let job = store_one(&completions, Fence::NONE);
        // Stores may hold one slot of the two.
        let other = house.lend(Purpose::Store);
        let lane = thread::spawn({
            let house = Shared::clone(&house);
            move || {
                loop {
                    let seen = house.signals.copy.generation();
                    match house.queues.next_copy() {
                        CopyWork::Gather(batch) => {
                            for (ticket, mut slot) in batch {
                                house.write(&mut slot);
                                let slot = slot.gathered(ticket.transfer(), Checksum::of(&[]));
                                let payload = Payload::InSlot(slot);
                                house.queues.push_put(Put { ticket, payload });
                            }
                        }
                        CopyWork::Place(_) => unreachable!("no node memory"),
                        CopyWork::Wait(until) => house.signals.copy.wait(seen, until),
                        CopyWork::Close => return,
                    }
                }
            }
        });
        let canceller = thread::spawn({
            let house = Shared::clone(&house);
            let job = Arc::clone(&job);
            move || {
                drop(other);
                house.queues.cancel_store(&job);
            }
        });
        house.queues.push_gathers(job.tickets());
        let mut heard = Vec::new();
        assert!(completions.wait(Instant::now() + Duration::from_secs(3600)));
        completions.drain(&mut heard);
        // Once released, it waits to be put, unless it was cancelled.
        if let PutWork::Put(batch) = house.queues.next_put() {
            for Put { ticket, payload } in batch {
                drop(payload);
                ticket.resolve(Outcome::Stored(BYTES as u64));
            }
        }
        house.queues.close();
        lane.join().unwrap();
        canceller.join().unwrap();
        completions.drain(&mut heard);
        let events: Vec<_> = heard.into_iter().map(|heard| heard.event).collect();
        let [Event::Released, Event::Stored(outcomes)] = &events[..] else {
            panic!("{events:?}");
        };
        let expected = [Outcome::Stored(BYTES as u64), Outcome::Cancelled];
        assert!(expected.contains(&outcomes.blocks[0]), "{outcomes:?}");
    });
}

#[test]
fn what_is_given_up_while_a_lane_has_it_does_not_come_back() {
    loom::model(|| {
        let house = House::new(2, 0);
        let completions = Arc::new(Completions::default());
        let job = store_one(&completions, Fence::NONE);
        house.queues.push_gathers(job.tickets());
        let lane = thread::spawn({
            let house = Shared::clone(&house);
            move || {
                // As if there were no room for it in node memory.
                if let CopyWork::Gather(batch) = house.queues.next_copy() {
                    for (ticket, slot) in batch {
                        drop(slot);
                        house.queues.gather_instead(ticket);
                    }
                }
            }
        });
        house.queues.give_up_gathers(&[Arc::clone(&job)]);
        lane.join().unwrap();
        assert!(matches!(house.queues.next_copy(), CopyWork::Wait(None)));
        let mut heard = Vec::new();
        completions.drain(&mut heard);
        let events: Vec<_> = heard.into_iter().map(|heard| heard.event).collect();
        let [Event::Released, Event::Stored(outcomes)] = &events[..] else {
            panic!("{events:?}");
        };
        assert_eq!(outcomes.blocks, [Outcome::Dropped]);
    });
}

#[test]
fn a_load_that_is_cancelled_while_a_lane_writes_is_over_if_the_write_was_in_vain() {
    loom::model(|| {
        let completions = Arc::new(Completions::default());
        let spec = LoadSpec {
            aim: Aim::Blocks,
            plan: one_object(),
            deadline: Deadline::from(Instant::now() + Duration::from_secs(3600)),
            prefix: true,
            fence: Fence::NONE,
            fence_wait: Duration::ZERO,
        };
        let job = LoadJob::new(
            1,
            spec,
            vec![None],
            Arc::clone(&completions),
            Arc::default(),
        );
        let lane = thread::spawn({
            let job = Arc::clone(&job);
            move || {
                let tickets = job.take(1, BYTES);
                for ticket in &tickets {
                    if ticket.begin_scatter() {
                        ticket.scatter_later();
                    }
                }
                // They would be fetched now.
                tickets
            }
        });
        job.abandon(Outcome::Cancelled);
        let fetched = lane.join().unwrap();
        assert!(fetched.iter().all(|ticket| !ticket.is_wanted()));
        let mut heard = Vec::new();
        completions.drain(&mut heard);
        let [Event::Loaded(outcomes)] = heard.iter().map(|h| &h.event).collect::<Vec<_>>()[..]
        else {
            panic!("it is over");
        };
        assert_eq!(outcomes.blocks, [Outcome::Cancelled]);
    });
}

#[test]
fn what_waits_for_a_fence_is_gathered_once_it_is_passed() {
    loom::model(|| {
        let house = House::new(2, 0);
        let completions = Arc::new(Completions::default());
        let (mark, fence) = Mark::new();
        let job = store_one(&completions, fence);
        house.queues.push_gathers(job.tickets());
        let watch = thread::spawn({
            let house = Shared::clone(&house);
            move || {
                mark.set(Passage::Passed(Instant::now()));
                house.signals.copy.notify_all();
            }
        });
        loop {
            let seen = house.signals.copy.generation();
            match house.queues.next_copy() {
                CopyWork::Gather(batch) => {
                    assert!(matches!(job.passage(), Passage::Passed(_)));
                    for (ticket, slot) in batch {
                        drop(slot);
                        ticket.resolve(Outcome::Stored(BYTES as u64));
                    }
                    break;
                }
                CopyWork::Place(_) => unreachable!("no node memory"),
                CopyWork::Wait(until) => house.signals.copy.wait(seen, until),
                CopyWork::Close => unreachable!("nobody closes"),
            }
        }
        watch.join().unwrap();
    });
}
