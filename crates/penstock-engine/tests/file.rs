//! The engine over the store that needs no server: what one engine stores, another process's
//! engine would find, and damage on disk is found out.

use std::path::{Path, PathBuf};

use penstock_contract::{Block, Parent};
use penstock_engine::{Engine, Fence, Outcome};
use penstock_layout::KvLayout;
use penstock_store::OpenOptions;

use crate::support::*;

fn engine_on<'kv>(directory: &Path, kv: &'kv Kv) -> Rig<'kv> {
    let url = format!("file://{}?size=256MiB", directory.display());
    let store = penstock_store::open(&url, &OpenOptions::default()).unwrap();
    let engine = Engine::new(store, config(8)).unwrap();
    let rig = Rig::from(engine);
    rig.register_kv(kv);
    rig
}

fn objects() -> Vec<Block> {
    (0..BLOCKS).map(|n| block_of(n, n)).collect()
}

#[test]
fn blocks_survive_the_engine_and_damage_on_disk_is_rejected() {
    let directory = tempfile::tempdir().unwrap();
    let source = Kv::new(KvLayout::LBNHC);
    for block in 0..BLOCKS {
        source.fill(block, block);
    }
    let writer = engine_on(directory.path(), &source);
    // A bounded arena may drop some: try until all are in.
    eventually("everything is stored", || {
        writer.submit_store(1, objects(), Fence::NONE).unwrap();
        outcomes(&writer, 1)
            .iter()
            .all(|o| *o == Outcome::AlreadyPresent)
    });
    drop(writer);

    let target = Kv::new(KvLayout::BHLNC);
    let reader = engine_on(directory.path(), &target);
    reader
        .submit_load(1, objects(), soon(), true, Fence::NONE)
        .unwrap();
    assert_eq!(
        outcomes(&reader, 1),
        vec![Outcome::Loaded(BLOCK_BYTES as u64); BLOCKS as usize]
    );
    for block in 0..BLOCKS {
        assert_eq!(target.read(block, share()), pattern(block));
    }

    let damaged = damage_every_value(directory.path());
    assert_eq!(damaged, BLOCKS);
    let before = target.all();
    for block in 0..BLOCKS {
        reader
            .submit_load(
                1,
                vec![block_of(block, BLOCKS - 1 - block)],
                soon(),
                true,
                Fence::NONE,
            )
            .unwrap();
        let outcomes = outcomes(&reader, 1);
        assert!(
            matches!(outcomes[..], [Outcome::Rejected(_)]),
            "{outcomes:?}"
        );
    }
    assert!(target.all() == before);
    eventually("every damaged value is removed", || {
        reader
            .submit_load(1, objects(), soon(), false, Fence::NONE)
            .unwrap();
        outcomes(&reader, 1).iter().all(|o| *o == Outcome::Miss)
    });
}

#[test]
fn the_place_in_a_prompt_is_in_the_time_of_use() {
    let directory = tempfile::tempdir().unwrap();
    let kv = Kv::new(KvLayout::LBNHC);
    let rig = engine_on(directory.path(), &kv);
    let after = |tokens| Block {
        parent: Some(Parent {
            chunk: key(9).chunk,
            tokens,
        }),
        ..block_of(0, 0)
    };
    rig.submit_store(1, vec![after(1_000_000)], Fence::NONE)
        .unwrap();
    assert!(matches!(outcomes(&rig, 1)[..], [Outcome::Stored(_)]));
    let path = value_in(directory.path()).unwrap();
    let age = || path.metadata().unwrap().modified().unwrap().elapsed();
    assert_eq!(age().unwrap().as_secs() / 100, 4, "0.4 ms a token");
    let load = |job, object| {
        rig.submit_load(job, vec![object], soon(), true, Fence::NONE)
            .unwrap();
        assert!(matches!(outcomes(&rig, job)[..], [Outcome::Loaded(_)]));
    };
    load(2, after(1_000_000));
    assert_eq!(age().unwrap().as_secs() / 100, 4);
    load(3, block_of(0, 0));
    assert!(age().unwrap().as_secs() < 100);
}

/// A value's file.
fn value_in(directory: &Path) -> Option<PathBuf> {
    let entries = std::fs::read_dir(directory).unwrap();
    entries
        .map(|entry| entry.unwrap().path())
        .find_map(|path| match path.is_dir() {
            true => value_in(&path),
            false => (path.metadata().unwrap().len() > BLOCK_BYTES as u64).then_some(path),
        })
}

/// Flips a bit, somewhere else in each, and cuts every third short.
fn damage_every_value(directory: &Path) -> u64 {
    let mut damaged = 0;
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            damaged += damage_every_value(&path);
            continue;
        }
        let mut value = std::fs::read(&path).unwrap();
        if value.len() != BLOCK_BYTES + 64 {
            continue;
        }
        if damaged % 3 == 2 {
            value.truncate(value.len() - 1 - damaged as usize);
        } else {
            let at = (damaged as usize * 997) % value.len();
            value[at] ^= 4;
        }
        std::fs::write(&path, value).unwrap();
        damaged += 1;
    }
    damaged
}
