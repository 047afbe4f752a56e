//! Values of a shared-memory pool that go straight to where they are used.

use std::fs;
use std::io::{IoSlice, IoSliceMut};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use penstock_contract::testing::{Faults, Faulty};
use penstock_contract::{ErrorKind, Key, Namespace, PutOutcome, Store};
use penstock_store::ShmStore;
use penstock_store::layers::{Breaker, BreakerSettings, Quota, Quotas, Tiered};
use penstock_value::compress::Element;
use penstock_value::header::{self, Checksum, HEADER_BYTES, Label, Writer};
use penstock_value::sealed::{Finding, Got, HeaderRoom, LARGEST_HEADER_BYTES, Wanted};
use penstock_value::{Keyring, MemoryStore, SealedStore};
use proptest::prelude::*;

use crate::behaviour::{bytes, eventually, key, soon};

const SIZE: u64 = 8 << 20;
const NAMESPACE: Namespace = Namespace([9; 16]);

/// A pool of this test's own, which is removed when the test ends.
struct Pool(String);

impl Pool {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        Self(format!("test-in-place-{}-{n}", std::process::id()))
    }

    fn path(&self) -> PathBuf {
        PathBuf::from(format!("/dev/shm/penstock-{}", self.0))
    }

    fn shm(&self) -> Arc<dyn Store> {
        Arc::new(ShmStore::open(&self.0, Some(SIZE)).unwrap())
    }

    fn open(&self) -> SealedStore {
        SealedStore::new(self.shm(), None)
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let _ = fs::remove_file(self.path());
    }
}

fn put(store: &SealedStore, key: &Key, payload: &[u8]) -> penstock_contract::Result<PutOutcome> {
    let header = header::seal(
        key,
        Writer::UNKNOWN,
        payload.len() as u64,
        Checksum::of(payload),
    );
    let slices = [&header[..], payload].map(IoSlice::new);
    store.store().put(key, &slices, soon())
}

/// What arrived, in pieces of up to `piece` bytes, and whether it verified.
fn read(store: &SealedStore, key: &Key, len: usize, piece: usize) -> (Vec<u8>, bool) {
    let mut header = HeaderRoom::new();
    let mut payload = vec![0; len];
    let pieces = payload.chunks_mut(piece).map(IoSliceMut::new);
    let wanted = Wanted {
        key,
        context: &[],
        position: 0,
        payload_bytes: Some(len as u64),
        memory: header.before(store.header_bytes(), pieces),
    };
    let got = store.read_in_place(wanted, soon());
    let is_whole = matches!(&got, Got::Payload(verified) if verified.bytes() == len as u64);
    assert!(is_whole || !matches!(got, Got::Payload(_)));
    (payload, is_whole)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// A value of any length arrives whole, in any pieces.
    #[test]
    fn the_value_is_the_same(len in 0_usize..200_000, piece in 1_usize..70_000) {
        let pool = Pool::new();
        let key = key(NAMESPACE, 1);
        let payload = bytes(len as u64, len);
        put(&pool.open(), &key, &payload).unwrap();
        prop_assert_eq!(read(&pool.open(), &key, len, piece), (payload, true));
    }

    /// A payload that is put in place in any pieces is the value that others are.
    #[test]
    fn what_is_put_in_place_is_the_same(len in 0_usize..200_000, piece in 1_usize..70_000) {
        let pool = Pool::new();
        let store = pool.open();
        let (one, other) = (key(NAMESPACE, 1), key(NAMESPACE, 2));
        let payload = bytes(len as u64, len);
        let put_in_place = |key| {
            let pieces = payload.chunks(piece).map(IoSlice::new);
            let room = store.reserve(key, Writer::UNKNOWN, len as u64, 7, soon()).unwrap();
            room.map(|room| room.fill(pieces).unwrap())
        };
        prop_assert_eq!(put_in_place(&one), Some(PutOutcome::Stored));
        prop_assert_eq!(put_in_place(&one), None);
        put(&store, &other, &payload).unwrap();
        let whole = |key| pool.open().get_whole(&[(key, 0)], soon()).remove(0).unwrap().unwrap();
        prop_assert_eq!(&whole(one)[HEADER_BYTES..], &whole(other)[HEADER_BYTES..]);
        prop_assert_eq!(store.examine(&one, &whole(one)), Finding::Sound);
        prop_assert_eq!(read(&pool.open(), &one, len, piece), (payload.clone(), true));

        // And along it goes to other stores.
        let mut memory = vec![0; LARGEST_HEADER_BYTES + len + 5];
        let room = &mut &mut memory[..];
        let along = store.copy_along(&one, len, room, soon()).unwrap();
        prop_assert_eq!(room.len(), 5);
        let far = SealedStore::new(Arc::new(MemoryStore::new(1 << 20)), None);
        let outcome = far.put_many(&[along.value(7)], soon()).remove(0);
        prop_assert_eq!(outcome.unwrap(), PutOutcome::Stored);
        let there = far.get_whole(&[(one, 0)], soon()).remove(0).unwrap().unwrap();
        prop_assert_eq!(there, whole(one));
    }

    /// A coded value arrives as its payload, in any pieces, or not at all.
    #[test]
    fn coded_values_are_decoded_on_the_way(
        len in 0_usize..200_000,
        piece in 1_usize..70_000,
        number in 0..Element::ALL.len(),
        bit in any::<prop::sample::Index>(),
    ) {
        let pool = Pool::new();
        let store = pool.open().taking_coded();
        prop_assert!(store.is_read_in_place());
        let key = key(NAMESPACE, 1);
        let mut payload = bytes(len as u64, len);
        // Most exponents are alike, and a few are not.
        for (at, byte) in payload.iter_mut().enumerate() {
            if at % 501 != 7 {
                *byte = *byte & 0x83 | 0x3c;
            }
        }
        let mut memory = vec![0; HEADER_BYTES + len];
        let (element, sum) = (Element::ALL[number], Checksum::of(&payload));
        let room = &mut &mut memory[..];
        let coded = store.seal_coded(Label::of(&key), element, &payload, sum, room).unwrap();
        match coded {
            Some(coded) => store.put_many(&[coded.value(0)], soon()).remove(0).unwrap(),
            None => put(&store, &key, &payload).unwrap(),
        };
        prop_assert_eq!(read(&store, &key, len, piece), (payload, true));
        prop_assert!(!read(&store, &key, len + 1, piece).1);

        let mut value = store.get_whole(&[(key, 0)], soon()).remove(0).unwrap().unwrap();
        let bit = bit.index(value.len() * 8);
        value[bit / 8] ^= 1 << (bit % 8);
        store.remove(&[key], soon()).unwrap();
        store.store().put(&key, &[IoSlice::new(&value)], soon()).unwrap();
        prop_assert!(!read(&store, &key, len, piece).1);
    }

    /// One flipped bit anywhere in a value, and it does not verify.
    #[test]
    fn damage_is_found(bit in 0..(HEADER_BYTES + 50_000) * 8) {
        let pool = Pool::new();
        let store = pool.open();
        let key = key(NAMESPACE, 1);
        let payload = bytes(1, 50_000);
        put(&store, &key, &payload).unwrap();

        // A new pool's pages of 4 KiB and 64 bytes lie side by side.
        let mut memory = fs::read(pool.path()).unwrap();
        let value = memory.windows(64).position(|w| w == &payload[..64]).unwrap() - HEADER_BYTES;
        let at = value + bit / 8;
        memory[at] ^= 1 << (bit % 8);
        let file = fs::OpenOptions::new().write(true).open(pool.path()).unwrap();
        file.write_all_at(&memory[at..=at], at as u64).unwrap();
        prop_assert!(!read(&store, &key, payload.len(), 4096).1);
        let mut memory = vec![0; LARGEST_HEADER_BYTES + payload.len()];
        let along = store.copy_along(&key, payload.len(), &mut &mut memory[..], soon());
        prop_assert!(along.is_none());
    }
}

#[test]
fn only_what_is_there_as_asked_for_verifies() {
    let pool = Pool::new();
    let store = pool.open();
    let (here, elsewhere) = (key(NAMESPACE, 1), key(NAMESPACE, 2));
    assert!(!read(&store, &here, 100, 64).1);
    put(&store, &here, &bytes(1, 1000)).unwrap();
    assert!(!read(&store, &here, 999, 64).1, "shorter");
    assert!(!read(&store, &here, 1001, 64).1, "longer");
    assert!(!read(&store, &elsewhere, 1000, 64).1);
    assert!(!read(&store, &key(Namespace([8; 16]), 1), 1000, 64).1);
    assert!(read(&store, &here, 1000, 64).1);
}

#[test]
fn only_the_nearest_tier_is_read_in_place() {
    let pool = Pool::new();
    let far: Arc<dyn Store> = Arc::new(MemoryStore::new(1 << 20));
    let near: Arc<dyn Store> = Arc::new(Breaker::new(pool.shm(), BreakerSettings::default()));
    let tiers = |stores: Vec<Arc<dyn Store>>| SealedStore::new(Arc::new(Tiered::new(stores)), None);

    let both = tiers(vec![near.clone(), far.clone()]);
    assert!(both.is_read_in_place());
    let key = key(NAMESPACE, 1);
    put(&pool.open(), &key, &bytes(1, 5000)).unwrap();
    assert_eq!(read(&both, &key, 5000, 4096), (bytes(1, 5000), true));

    let alone = SealedStore::new(near.clone(), None);
    assert!(alone.is_read_in_place());
    let turned = tiers(vec![far, near]);
    assert!(!turned.is_read_in_place());
}

#[test]
fn encrypted_values_are_not_read_in_place() {
    let pool = Pool::new();
    let keys = Keyring::parse(&format!("one:{}=", "A".repeat(43))).unwrap();
    let store = SealedStore::new(pool.shm(), Some(Arc::new(keys)));
    assert!(!store.is_read_in_place());
    let key = key(NAMESPACE, 1);
    put(&pool.open(), &key, &bytes(1, 5000)).unwrap();
    assert!(!read(&store, &key, 5000, 4096).1);
}

/// Writers go round in a pool that holds a fraction, while readers read: what verifies is right.
#[test]
fn what_is_overwritten_meanwhile_does_not_verify() {
    let pool = Pool::new();
    let over = AtomicBool::new(false);
    let len = |n: u64| 100_000 + 1000 * (n as usize % 50);
    std::thread::scope(|scope| {
        for seed in 0..2_u64 {
            let (store, over) = (pool.open(), &over);
            scope.spawn(move || {
                let mut n = seed * 7;
                while !over.load(Ordering::Relaxed) {
                    n = (n + 1) % 200;
                    let (key, payload) = (key(NAMESPACE, n), bytes(n, len(n)));
                    let put = match seed {
                        0 => put(&store, &key, &payload),
                        _ => store
                            .reserve(&key, Writer::UNKNOWN, payload.len() as u64, 0, soon())
                            .and_then(|room| {
                                room.map_or(Ok(PutOutcome::AlreadyPresent), |room| {
                                    room.fill([IoSlice::new(&payload)])
                                })
                            }),
                    };
                    let full = |e: &penstock_contract::Error| e.kind() == ErrorKind::Full;
                    assert!(put.as_ref().err().is_none_or(full));
                }
            });
        }
        let store = pool.open();
        let (mut whole, mut n) = (0, 0);
        eventually("enough reads find something", || {
            for _ in 0..100 {
                n = (n + 3) % 200;
                let (seen, verified) = read(&store, &key(NAMESPACE, n), len(n), 4096);
                if verified {
                    assert!(seen == bytes(n, len(n)), "{n}");
                    whole += 1;
                }
            }
            whole > 1000
        });
        over.store(true, Ordering::Relaxed);
    });
}

/// Puts a layer over a store.
type Layer = fn(Arc<dyn Store>, Quotas) -> Arc<dyn Store>;

#[test]
fn layers_pass_on_what_their_store_can() {
    let pool = Pool::new();
    let mut quotas = Quotas::default();
    quotas.add("tenant/red:1MiB").unwrap();
    let layers: [Layer; 2] = [
        |inner, _| Arc::new(Breaker::new(inner, BreakerSettings::default())),
        |inner, quotas| Arc::new(Quota::new(inner, quotas).unwrap()),
    ];
    for layer in layers {
        let over = |inner| layer(inner, quotas.clone());
        let (bare, layered) = (pool.shm(), over(pool.shm()));
        let (own, below) = (layered.memory().unwrap(), bare.memory().unwrap());
        assert_eq!(own.region().len(), below.region().len());
        assert_eq!(layered.charge(5000), bare.charge(5000));
        assert_ne!(layered.charge(5000), 5000, "it is the store's");
        let tiers: Arc<dyn Store> = Arc::new(Tiered::new(vec![pool.shm(), pool.shm()]));
        assert_eq!(over(tiers).tiers().len(), 2);
    }
    // What is used where it lies would come without faults.
    assert!(
        Faulty::new(pool.shm(), Faults::default())
            .memory()
            .is_none()
    );
}
