//! The shared-memory store: what every store does, and what only memory shared by processes has to.

use std::fs;
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use penstock_contract::{ErrorKind, Key, PutOutcome, Store};
use penstock_evict::{Clock, Policy};
use penstock_store::{OpenOptions, ShmStore};
use penstock_value::header::HEADER_BYTES;
use rustix::process::Signal;

use crate::behaviour::sealed::{
    Process, SHARED, assert_whole, listed, put_sealed, put_sealed_by, whole_values,
};
use crate::behaviour::{eventually, key, prompt, soon, within};

/// Names the role of a process that a test starts, the pool it works on, and its seed.
const ROLE: &str = "PENSTOCK_TEST_ROLE";
const POOL: &str = "PENSTOCK_TEST_POOL";
const SEED: &str = "PENSTOCK_TEST_SEED";
const SIZE: u64 = 8 << 20;

/// A pool of this test's own, which is removed when the test ends.
struct Pool(String);

impl Pool {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        Self(format!("test-{}-{n}", std::process::id()))
    }

    fn path(&self) -> PathBuf {
        PathBuf::from(format!("/dev/shm/penstock-{}", self.0))
    }

    fn open(&self, size: u64) -> Arc<dyn Store> {
        Arc::new(ShmStore::open(&self.0, Some(size)).unwrap())
    }

    fn fails(&self, size: Option<u64>) -> (ErrorKind, String) {
        let error = ShmStore::open(&self.0, size).err().expect("an error");
        (error.kind(), error.to_string())
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let _ = fs::remove_file(self.path());
    }
}

#[test]
fn behaves() {
    let pool = Pool::new();
    crate::behaviour::run_all(|| pool.open(32 << 20));
}

#[test]
fn stays_within_its_bound() {
    let pool = Pool::new();
    crate::behaviour::stays_within_its_bound(|| pool.open(4 << 20), 4 << 20);
}

#[test]
fn what_is_retired_goes_first() {
    let pool = Pool::new();
    crate::behaviour::retired_goes_first(|| pool.open(4 << 20), 4 << 20);
}

#[test]
fn what_is_touched_stays() {
    let pool = Pool::new();
    crate::behaviour::touched_outlives_untouched(|| pool.open(4 << 20), 4 << 20);
    let pool = Pool::new();
    let store = pool.open(SIZE);
    prompt::put(&*store, false);
    prompt::touch(&*store);
    prompt::assert_the_beginning_stays(&*store, 80 / 16);
}

#[test]
fn use_keeps_a_value_from_eviction() {
    let pool = Pool::new();
    let (store, other) = (pool.open(SIZE), pool.open(SIZE));
    for n in 0..300 {
        put_sealed(&*store, n, 100_000).unwrap();
        assert!(assert_whole(&*other, &key(SHARED, 0)), "used, {n}");
    }
    assert!(!assert_whole(&*store, &key(SHARED, 1)));
}

#[test]
fn nothing_is_evicted_while_there_is_room() {
    let pool = Pool::new();
    let store = pool.open(SIZE);
    (0..70).for_each(|n| assert!(put_sealed(&*store, n, 100_000).is_ok()));
    // Every other goes, so that the room lies in pieces.
    let gone: Vec<Key> = (0..70).step_by(2).map(|n| key(SHARED, n)).collect();
    assert_eq!(store.remove(&gone, soon()).unwrap(), 35);
    (100..110).for_each(|n| assert!(put_sealed(&*store, n, 300_000).is_ok()));
    assert_eq!(store.stats().evictions, 0);
    assert_eq!(whole_values(&*store), 45);
}

#[test]
fn of_a_prompt_the_end_goes_first() {
    for is_read in [false, true] {
        let pool = Pool::new();
        let store = pool.open(SIZE);
        prompt::put(&*store, !is_read);
        if is_read {
            prompt::read(&*store);
        }
        // That changes nothing: a scrub's order must not become the order of use.
        prompt::look(&*store);
        // A sixteenth of what there is room for.
        prompt::assert_the_beginning_stays(&*store, 80 / 16);
    }
}

/// A simulation predicts what the pool finds: it has the same sweep.
#[test]
fn what_stays_is_what_the_clock_keeps() {
    let pool = Pool::new();
    let store = pool.open(SIZE);
    let page = fact(&*store, "page_bytes");
    let places = fact(&*store, "capacity_bytes") / page;
    let mut clock: Clock<u64> = Clock::new(places);
    let (mut dice, mut hits, mut evicted) = (Dice(7), 0, 0);
    for _ in 0..20_000 {
        // Some often, most hardly ever.
        let n = match dice.roll(3) {
            0 => dice.roll(40),
            1 => dice.roll(400),
            _ => dice.roll(4000),
        };
        // Long ones, so that no bucket of entries runs full before the pages do.
        let pages = 8 + n % 23;
        assert_eq!(assert_whole(&*store, &key(SHARED, n)), clock.touch(&n));
        if clock.contains(&n) {
            hits += 1;
            continue;
        }
        let before = clock.len();
        clock.insert(n, pages);
        evicted += before + 1 - clock.len();
        let bytes = (pages * page) as usize - HEADER_BYTES;
        assert_eq!(put_sealed(&*store, n, bytes).unwrap(), PutOutcome::Stored);
        assert_eq!(store.stats().evictions, evicted as u64);
    }
    assert!(hits > 2_000 && evicted > 2_000, "{hits}, {evicted}");
}

#[test]
fn a_value_that_is_replaced_gives_its_room_back() {
    let pool = Pool::new();
    let store = pool.open(SIZE);
    for n in 0..200 {
        let len = 50_000 + n;
        assert_eq!(
            put_sealed(&*store, 1, len).unwrap(),
            PutOutcome::Stored,
            "another length"
        );
        assert_eq!(fact(&*store, "objects"), 1);
        assert_eq!(fact(&*store, "value_bytes"), (HEADER_BYTES + len) as u64);
    }
}

fn fact(store: &dyn Store, name: &str) -> u64 {
    let facts = store.describe(soon()).unwrap();
    let (_, value) = facts.iter().find(|(found, _)| found == name).unwrap();
    value.parse().unwrap()
}

/// Empties the pool and fills it to the last page, which takes that nothing of it is lost.
fn assert_all_room_is_usable(pool: &Pool) {
    let store = &*pool.open(SIZE);
    let keys: Vec<Key> = listed(store).iter().map(|object| object.key).collect();
    store.remove(&keys, soon()).unwrap();
    assert_eq!(fact(store, "objects"), 0);
    let (capacity, page) = (fact(store, "capacity_bytes"), fact(store, "page_bytes"));
    let pages = capacity / page;
    let many = (page * (pages / 20)) as usize - HEADER_BYTES;
    let evictions = store.stats().evictions;
    for n in 0..20 {
        assert_eq!(
            put_sealed(store, 1 << 40 | n, many).unwrap(),
            PutOutcome::Stored
        );
    }
    for n in 20..20 + pages % 20 {
        assert!(put_sealed(store, 1 << 40 | n, 1).is_ok());
    }
    assert_eq!(fact(store, "used_bytes"), capacity);
    assert_eq!(store.stats().evictions, evictions);
    assert_eq!(whole_values(store) as u64, 20 + pages % 20);
}

/// Small numbers that look random.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % sides
    }
}

/// The processes that the tests start; does nothing in a run of the tests themselves.
#[test]
#[ignore = "a role of other tests' processes"]
fn in_a_process_of_its_own() {
    let (Ok(role), Ok(pool), Ok(seed)) = (
        std::env::var(ROLE),
        std::env::var(POOL),
        std::env::var(SEED),
    ) else {
        return;
    };
    let open = |size| ShmStore::open(&pool, Some(size));
    let mut dice = Dice(
        seed.parse::<u64>()
            .unwrap()
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            | 1,
    );
    // Some of one page, some that force several others out.
    let mut use_at_random = |store: &dyn Store| {
        let n = dice.roll(300);
        match dice.roll(16) {
            0..=6 => {
                // A key's value may have another length each time.
                let len = [100, 3_000, 60_000, 150_000, 900_000][dice.roll(5) as usize];
                match put_sealed(store, n, len + dice.roll(3) as usize) {
                    Ok(_) => {}
                    Err(error) => assert_eq!(error.kind(), ErrorKind::Full, "{error}"),
                }
                0
            }
            7 => store.remove(&[key(SHARED, n)], soon()).unwrap(),
            _ => u64::from(assert_whole(store, &key(SHARED, n))),
        }
    };
    match role.as_str() {
        "use at random" => {
            let store = open(SIZE).unwrap();
            let found: u64 = (0..3000).map(|_| use_at_random(&store)).sum();
            assert!(found > 100, "found {found}");
        }
        "use at random without end" => {
            let store = open(SIZE).unwrap();
            loop {
                use_at_random(&store);
            }
        }
        "create" => {
            let store = open(64 << 20).unwrap();
            let n = u64::from(std::process::id());
            put_sealed(&store, n, 10_000).unwrap();
            assert!(assert_whole(&store, &key(SHARED, n)));
        }
        "use what was cut short" => {
            let store = open(SIZE).unwrap();
            put_sealed(&store, 1, 10_000).unwrap();
            assert!(assert_whole(&store, &key(SHARED, 1)));
            let path = format!("/dev/shm/penstock-{pool}");
            let file = fs::File::options().write(true).open(path).unwrap();
            for bytes in [SIZE / 2, 4096, 0] {
                file.set_len(bytes).unwrap();
                assert_is_cut_short(&store);
            }
        }
        other => panic!("no such role: {other}"),
    }
}

/// Every operation says so. The kernel would end this process if one touched what is gone.
fn assert_is_cut_short(store: &dyn Store) {
    let name = key(SHARED, 1);
    let mut into = vec![0; 20_000];
    let errors = [
        store.contains(&[name], soon()).err(),
        store.remove(&[name], soon()).err(),
        store.touch(&[(name, 1)], soon()).err(),
        store
            .get(&name, &mut [std::io::IoSliceMut::new(&mut into)], soon())
            .err(),
        store.list(None, &mut |_| (), soon()).err(),
        store.describe(soon()).err(),
        put_sealed(store, 1, 10_000).err(),
        put_sealed(store, 2, 10_000).err(),
    ];
    for error in errors {
        let error = error.expect("nothing goes on");
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        assert!(error.to_string().contains("cut short"), "{error}");
    }
}

#[test]
fn a_segment_that_is_cut_short_is_an_error_and_ends_no_process() {
    let pool = Pool::new();
    assert!(start("use what was cut short", &pool, 1).succeeds());
}

#[test]
fn a_length_that_no_value_has_is_a_miss_and_harms_no_other_value() {
    let pool = Pool::new();
    let store = pool.open(SIZE);
    put_sealed(&*store, 1, 10_000).unwrap();
    let length = (12_345 + HEADER_BYTES as u64).to_le_bytes();
    for wrong in [u64::MAX, 1 << 63, 1 << 42, SIZE + 1] {
        put_sealed(&*store, 2, 12_345).unwrap();
        let mut content = fs::read(pool.path()).unwrap();
        let at = content.chunks(8).position(|word| word == length);
        let at = at.expect("the entry says how long its value is") * 8;
        content[at..at + 8].copy_from_slice(&wrong.to_le_bytes());
        let file = fs::File::options().write(true).open(pool.path()).unwrap();
        file.write_all_at(&content[at..at + 8], at as u64).unwrap();
        assert_eq!(
            store.contains(&[key(SHARED, 2)], soon()).ok(),
            Some(vec![false])
        );
        assert!(!assert_whole(&*store, &key(SHARED, 2)));
        assert!(assert_whole(&*store, &key(SHARED, 1)));
        assert_eq!(listed(&*store).len(), 1);
    }
    assert_all_room_is_usable(&pool);
}

fn start(role: &str, pool: &Pool, seed: u64) -> Process {
    let seed = seed.to_string();
    Process::start(
        "shm::in_a_process_of_its_own",
        &[
            (ROLE, role.as_ref()),
            (POOL, pool.0.as_ref()),
            (SEED, seed.as_ref()),
        ],
    )
}

#[test]
fn processes_share_one_bound_and_see_only_whole_values() {
    let pool = Pool::new();
    let store = pool.open(SIZE);
    let processes: Vec<Process> = (1..=4)
        .map(|seed| start("use at random", &pool, seed))
        .collect();
    assert!(processes.into_iter().all(Process::succeeds));
    assert!(whole_values(&*store) > 10);
    let mut keys: Vec<Key> = listed(&*store).iter().map(|object| object.key).collect();
    let values = keys.len();
    keys.sort();
    keys.dedup();
    assert_eq!(keys.len(), values, "one value a key");
    assert_all_room_is_usable(&pool);
}

#[test]
fn processes_killed_at_any_moment_leave_no_damage_and_no_lost_room() {
    let pool = Pool::new();
    let store = pool.open(SIZE);
    let mut dice = Dice(0x5eed);
    let mut running: Vec<Process> = Vec::new();
    for round in 0..120 {
        let before = fact(&*store, "objects");
        running.push(start("use at random without end", &pool, 1000 + round));
        if before == 0 {
            eventually("it puts", || fact(&*store, "objects") > 0);
        }
        std::thread::sleep(Duration::from_micros(dice.roll(20_000)));
        // Two are left to be in each other's way.
        if running.len() > 2 {
            running.remove(dice.roll(3) as usize).kill();
        }
        if round % 10 == 9 {
            whole_values(&*store);
            // Whoever holds what: waiting for it would last until the deadline.
            put_sealed(&*store, 5000 + round, 500_000).unwrap();
        }
    }
    eventually("there is much to look at", || fact(&*store, "objects") > 10);
    running.iter_mut().for_each(Process::kill);
    whole_values(&*store);
    assert_all_room_is_usable(&pool);
}

#[test]
fn a_stopped_process_holds_nobody_up_and_does_no_harm_when_it_goes_on() {
    let pool = Pool::new();
    let store = pool.open(SIZE);
    let mut process = start("use at random without end", &pool, 7);
    eventually("the process puts", || !listed(&*store).is_empty());
    for n in 0..60 {
        process.stop();
        // The pool over, several times. Whoever waited for the process would do so until the
        // deadline.
        for m in 0..40 {
            put_sealed(&*store, 1000 + m, 400_000 + n as usize).unwrap();
        }
        assert!(whole_values(&*store) > 0);
        process.signal(Signal::CONT);
        std::thread::sleep(Duration::from_millis(n % 7));
        // The process may evict all that is listed before it is looked at.
        whole_values(&*store);
    }
    drop(process);
    assert_all_room_is_usable(&pool);
}

#[test]
fn creators_agree_on_one_segment() {
    for round in 0..8 {
        let pool = Pool::new();
        let processes: Vec<Process> = (0..6)
            .map(|n| start("create", &pool, round * 10 + n))
            .collect();
        assert!(processes.into_iter().all(Process::succeeds));
        assert_eq!(whole_values(&*pool.open(64 << 20)), 6);
    }
}

#[test]
fn a_creator_that_is_killed_is_followed_by_the_next() {
    let (mut dice, mut round) = (Dice(0xc0de), 0);
    // Whether it was killed while it created the pool.
    let mut kill_one = || {
        round += 1;
        let pool = Pool::new();
        let mut process = start("create", &pool, round);
        eventually("it is being created", || pool.path().exists());
        std::thread::sleep(Duration::from_micros(dice.roll(3000)));
        process.kill();
        let is_half_made = pool.path().exists() && ShmStore::open(&pool.0, None).is_err();
        let store = pool.open(64 << 20);
        assert_eq!(put_sealed(&*store, 1, 1000).unwrap(), PutOutcome::Stored);
        assert!(assert_whole(&*store, &key(SHARED, 1)));
        is_half_made
    };
    if (0..40).filter(|_| kill_one()).count() == 0 {
        eventually("one is killed while it creates the pool", kill_one);
    }
}

#[test]
fn a_pool_is_there_until_its_file_is_removed() {
    let pool = Pool::new();
    let (kind, message) = pool.fails(None);
    assert_eq!(kind, ErrorKind::Config);
    assert!(message.contains("give a size"), "{message}");
    let url = pool.open(SIZE).url();
    assert_eq!(url, format!("shm://{}?size={SIZE}", pool.0));
    let open = |url: &str| penstock_store::open(url, &OpenOptions::default()).unwrap();
    put_sealed(&*open(&url), 1, 1000).unwrap();
    // The last handle is gone, the value is not.
    let store = open(&format!("shm://{}", pool.0));
    assert!(assert_whole(&*store, &key(SHARED, 1)));
    assert_eq!(store.url(), url);
    fs::remove_file(pool.path()).unwrap();
    assert!(
        assert_whole(&*store, &key(SHARED, 1)),
        "those who have it keep it"
    );
    assert!(!assert_whole(&*open(&url), &key(SHARED, 1)));
}

#[test]
fn only_the_owner_can_look_inside() {
    let pool = Pool::new();
    drop(pool.open(SIZE));
    let mode = fs::metadata(pool.path()).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    fs::set_permissions(pool.path(), fs::Permissions::from_mode(0o666)).unwrap();
    assert_eq!(pool.fails(Some(SIZE)).0, ErrorKind::Denied);
    // A link could lead to anything.
    let other = Pool::new();
    symlink(pool.path(), other.path()).unwrap();
    assert_eq!(other.fails(Some(SIZE)).0, ErrorKind::Io);
}

#[test]
fn what_is_not_such_a_pool_is_refused_and_left_alone() {
    let pool = Pool::new();
    drop(pool.open(SIZE));
    let good = fs::read(pool.path()).unwrap();
    let refused = |content: &[u8], words: &str| {
        fs::write(pool.path(), content).unwrap();
        for size in [None, Some(SIZE)] {
            let (kind, message) = pool.fails(size);
            assert_eq!(kind, ErrorKind::Config, "{message}");
            assert!(message.contains(words), "{message}");
        }
        assert!(fs::read(pool.path()).unwrap() == content);
    };
    let changed = |at: usize, byte| {
        let mut content = good.clone();
        content[at] = byte;
        content
    };
    refused(&changed(0, b'X'), "not a pool's segment");
    refused(&changed(8, 9), "format version 9");
    refused(&changed(23, 9), "damaged");
    refused(&good[..good.len() / 2], "damaged");
    fs::write(pool.path(), &good).unwrap();
    let (kind, message) = pool.fails(Some(2 * SIZE));
    assert_eq!(kind, ErrorKind::Config);
    assert!(message.contains(&SIZE.to_string()), "{message}");
    assert_eq!(listed(&*pool.open(SIZE)), []);
}

#[test]
fn garbage_inside_is_missed_not_believed() {
    let pool = Pool::new();
    {
        let store = pool.open(SIZE);
        (0..60).for_each(|n| assert!(put_sealed(&*store, n, 100_000).is_ok()));
    }
    let good = fs::read(pool.path()).unwrap();
    let mut dice = Dice(0xbad);
    for round in 0..20 {
        // All that is not values, or about: the header stays.
        let mut content = good.clone();
        for byte in &mut content[4096..400_000] {
            if dice.roll(20) <= round {
                *byte = dice.roll(256) as u8;
            }
        }
        fs::write(pool.path(), content).unwrap();
        let store = pool.open(SIZE);
        for n in 0..60 {
            // Whatever comes, it comes: nothing outside is touched, and nothing hangs.
            let mut into = vec![0; 200_000];
            let mut slices = [std::io::IoSliceMut::new(&mut into)];
            store.get(&key(SHARED, n), &mut slices, soon()).unwrap();
        }
        for n in 100..130 {
            let _ = put_sealed_by(&*store, n, 100_000, within(Duration::from_millis(200)));
        }
        listed(&*store);
    }
}

#[test]
fn more_than_the_machine_has_is_refused_at_once() {
    let pool = Pool::new();
    let (kind, message) = pool.fails(Some(30 << 40));
    assert_eq!(kind, ErrorKind::Full);
    assert!(message.contains("choose a smaller size"), "{message}");
    assert!(!pool.path().exists());
}

#[test]
fn urls_name_the_pool_and_nothing_else() {
    for url in [
        "shm://",
        "shm:name?size=1M",
        "shm:///name?size=1M",
        "shm://name/path?size=1M",
        "shm://user@name?size=1M",
        "shm://user:hunter2@name?size=1M",
        "shm://name:1?size=1M",
        "shm://na%20me?size=1M",
        "shm://na$me?size=1M",
        "shm://name?size=1k",
        "shm://name?size=100T",
        "shm://name?bytes=1M",
    ] {
        let error = penstock_store::open(url, &OpenOptions::default()).err();
        let error = error.unwrap_or_else(|| panic!("{url} opened"));
        assert_eq!(error.kind(), ErrorKind::Config, "{url}: {error}");
        assert!(!error.to_string().contains("hunter2"));
    }
    let long = "n".repeat(201);
    assert!(ShmStore::open(&long, Some(SIZE)).is_err());
}

#[test]
fn handles_come_and_go_without_a_trace() {
    let pool = Pool::new();
    let count = || {
        let maps = fs::read_to_string("/proc/self/maps").unwrap();
        maps.lines().filter(|line| line.contains(&pool.0)).count()
    };
    for n in 0..1200 {
        let store = pool.open(1 << 20);
        put_sealed(&*store, n % 10, 1000).unwrap();
    }
    assert_eq!(count(), 0);
    let handles: Vec<_> = (0..20).map(|_| pool.open(1 << 20)).collect();
    assert_eq!(count(), 20);
    drop(handles);
    assert_eq!(count(), 0);
}
