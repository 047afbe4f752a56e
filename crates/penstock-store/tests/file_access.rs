//! The file store on a machine with other users: what they made, or may change, is not believed.

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use penstock_contract::{Error, ErrorKind, PutOutcome, Store};
use penstock_store::{FileStore, OpenOptions, Trust};
use rustix::fs::{CWD, RenameFlags, renameat_with};

use crate::behaviour::directory::{open, path_of};
use crate::behaviour::sealed::{SHARED, assert_whole, listed, put_sealed};
use crate::behaviour::{get, key, soon};

const CAPACITY: u64 = 8 << 20;
/// A user whom nobody trusts, and a group.
const OTHER: u32 = 65534;
const GROUP: u32 = 1234;

/// Whether files can be given to another user. Says so if not.
fn is_root(what: &str) -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        eprintln!("skipped: {what}, as only root can give a file to another user");
    }
    is_root
}

fn give(path: &Path) {
    chown(path, Some(OTHER), Some(OTHER)).unwrap();
}

/// Puts two directories in each other's place at once: a handle that looks meanwhile finds one of them.
fn exchange(one: &Path, other: &Path) {
    renameat_with(CWD, one, CWD, other, RenameFlags::EXCHANGE).unwrap();
}

fn allow(path: &Path, mode: u32) {
    fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
}

fn refused(root: &Path) -> Error {
    let error = FileStore::open(root, Some(CAPACITY), None, &Trust::default());
    let error = error.err().expect("not to be believed");
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
    error
}

fn open_url(root: &Path, rest: &str) -> Result<Arc<dyn Store>, Error> {
    let url = format!("file://{}?size={CAPACITY}{rest}", root.display());
    penstock_store::open(&url, &OpenOptions::default())
}

fn stores(store: &dyn Store, n: u64) {
    let stored = put_sealed(store, n, 1000).unwrap();
    assert_eq!(stored, PutOutcome::Stored);
    assert!(assert_whole(store, &key(SHARED, n)));
}

/// Nobody sees a value there.
fn misses(store: &dyn Store, n: u64) {
    let key = key(SHARED, n);
    assert_eq!(get(store, &key), None);
    assert_eq!(store.contains(&[key], soon()).unwrap(), [false]);
    assert_eq!(store.touch(&[(key, 0)], soon()).unwrap(), [false]);
    assert!(listed(store).iter().all(|listed| listed.key != key));
}

/// Makes a directory for this user alone, whatever the umask.
fn made(path: &Path) {
    fs::create_dir(path).unwrap();
    allow(path, 0o700);
}

#[test]
fn a_directory_of_another_user_is_refused_until_that_user_is_trusted() {
    if !is_root("a directory of another user") {
        return;
    }
    let root = tempfile::tempdir().unwrap();
    let pool = root.path().join("pool");
    made(&pool);
    give(&pool);
    let error = refused(&pool).to_string();
    for word in ["user 65534", "trust=65534", "beneath"] {
        assert!(error.contains(word), "{error}");
    }
    assert_eq!(fs::read_dir(&pool).unwrap().count(), 0, "nothing was made");
    let store = open_url(&pool, "&trust=65534").unwrap();
    stores(&*store, 0);
    assert!(store.url().ends_with("&trust=65534"), "{}", store.url());
    give(&path_of(&pool, 0));
    assert!(assert_whole(&*store, &key(SHARED, 0)));
}

#[test]
fn a_directory_that_others_may_write_into_is_refused_and_one_beneath_it_is_not() {
    for (mode, words) in [
        (0o777, ["every user", "chmod go-w", "trust=all"]),
        (0o1777, ["every user", "mode 777", "beneath"]),
        (0o775, ["group", "chmod -R g-w", "trust=group"]),
    ] {
        let root = tempfile::tempdir().unwrap();
        allow(root.path(), mode);
        let error = refused(root.path()).to_string();
        for word in words {
            assert!(error.contains(word), "{mode:o}: {error}");
        }
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0);
        stores(&*open(&root.path().join("beneath"), CAPACITY), 0);
    }
    let root = tempfile::tempdir().unwrap();
    allow(root.path(), 0o777);
    stores(&*open_url(root.path(), "&trust=all").unwrap(), 0);
}

#[test]
fn a_link_leads_to_the_directory_only_if_a_trusted_user_made_it() {
    let root = tempfile::tempdir().unwrap();
    let (pool, link) = (root.path().join("pool"), root.path().join("link"));
    made(&pool);
    symlink(&pool, &link).unwrap();
    stores(&*open(&link, CAPACITY), 0);
    assert!(path_of(&pool, 0).exists());
    if is_root("a link of another user") {
        std::os::unix::fs::lchown(&link, Some(OTHER), Some(OTHER)).unwrap();
        for path in [link.clone(), link.join("")] {
            assert!(refused(&path).to_string().contains("symbolic link"));
        }
    }
}

#[test]
fn what_lies_in_the_place_of_a_file_of_the_pool_is_neither_followed_nor_written() {
    let root = tempfile::tempdir().unwrap();
    let victim = root.path().join("victim");
    let text = "a file of somebody's, longer than a record of what is in use".repeat(2);
    fs::write(&victim, &text).unwrap();
    let is_root = is_root("a file of another user in a pool's file's place");
    for name in ["usage", "evict.lock", "tmp"] {
        let pool = root.path().join(format!("pool for {name}"));
        made(&pool);
        let place = pool.join(name);
        symlink(&victim, &place).unwrap();
        refused(&pool);
        fs::remove_file(&place).unwrap();
        fifo(&place);
        refused(&pool);
        fs::remove_file(&place).unwrap();
        let _listener = UnixListener::bind(&place).unwrap();
        refused(&pool);
        fs::remove_file(&place).unwrap();
        if is_root {
            match name {
                "tmp" => fs::create_dir(&place).unwrap(),
                _ => fs::write(&place, "").unwrap(),
            }
            allow(&place, 0o777);
            assert!(refused(&pool).to_string().contains("every user"));
            give(&place);
            assert!(refused(&pool).to_string().contains("user 65534"));
        }
    }
    assert_eq!(fs::read_to_string(&victim).unwrap(), text);
}

fn fifo(path: &Path) {
    assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
}

#[test]
fn what_lies_in_the_place_of_a_value_is_a_miss_and_a_put_replaces_it() {
    let root = tempfile::tempdir().unwrap();
    let store = open(root.path(), CAPACITY);
    // A whole value under its own key, wherever a copy of it lies.
    stores(&*store, 0);
    let path = path_of(root.path(), 0);
    let copy = root.path().join("copy");
    fs::copy(&path, &copy).unwrap();
    let is_root = is_root("a value of another user");
    let plants: [(&str, &dyn Fn()); 8] = [
        ("another user's value", &|| {
            fs::copy(&copy, &path).unwrap();
            if is_root {
                give(&path);
            } else {
                allow(&path, 0o606);
            }
        }),
        ("a value that everybody may write", &|| {
            fs::copy(&copy, &path).unwrap();
            allow(&path, 0o666);
        }),
        ("a value that a group may write", &|| {
            fs::copy(&copy, &path).unwrap();
            allow(&path, 0o660);
        }),
        ("a link to a value", &|| symlink(&copy, &path).unwrap()),
        ("a link to nothing", &|| symlink("nowhere", &path).unwrap()),
        ("a FIFO, which nobody writes to", &|| fifo(&path)),
        ("a socket", &|| {
            // The path of a socket that is made may not be long.
            let socket = root.path().join("socket");
            drop(UnixListener::bind(&socket).unwrap());
            fs::rename(&socket, &path).unwrap();
        }),
        ("a folder", &|| fs::create_dir(&path).unwrap()),
    ];
    for (what, plant) in plants {
        eprintln!("{what}");
        assert_eq!(store.remove(&[key(SHARED, 0)], soon()).unwrap(), 1);
        plant();
        misses(&*store, 0);
        // Nor does it hinder anybody who opens the pool.
        misses(&*open(root.path(), CAPACITY), 0);
        stores(&*store, 0);
    }
    // What a put cannot take away, it names.
    store.remove(&[key(SHARED, 0)], soon()).unwrap();
    fs::create_dir_all(path.join("with something in it")).unwrap();
    misses(&*store, 0);
    let error = put_sealed(&*store, 0, 1000).unwrap_err().to_string();
    assert!(error.contains(path.to_str().unwrap()), "{error}");
}

#[test]
fn a_namespaces_folder_that_another_user_swaps_is_not_believed() {
    if !is_root("a folder of another user") {
        return;
    }
    let root = tempfile::tempdir().unwrap();
    let store = open(root.path(), CAPACITY);
    stores(&*store, 0);
    let shard = path_of(root.path(), 0).parent().unwrap().to_owned();
    let namespace = shard.parent().unwrap().to_owned();
    for folder in [&namespace, &shard] {
        let aside = root.path().join("aside");
        fs::rename(folder, &aside).unwrap();
        fs::create_dir_all(&shard).unwrap();
        let value = path_of(root.path(), 0);
        fs::write(&value, "false").unwrap();
        give(&value);
        give(folder);
        misses(&*store, 0);
        let error = put_sealed(&*store, 0, 1000).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
        assert!(
            error.to_string().contains(folder.to_str().unwrap()),
            "{error}"
        );
        // A link to a folder of this user's is none either.
        fs::remove_dir_all(folder).unwrap();
        symlink(&aside, folder).unwrap();
        let error = put_sealed(&*store, 0, 1000).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
        fs::remove_file(folder).unwrap();
        fs::rename(&aside, folder).unwrap();
        assert!(assert_whole(&*store, &key(SHARED, 0)));
    }
}

#[test]
fn a_directory_that_another_user_swaps_gets_nothing() {
    if !is_root("a directory of another user") {
        return;
    }
    let root = tempfile::tempdir().unwrap();
    let (pool, aside) = (root.path().join("pool"), root.path().join("aside"));
    let store = open(&pool, CAPACITY);
    stores(&*store, 0);
    made(&aside);
    give(&aside);
    exchange(&pool, &aside);
    misses(&*store, 1);
    assert!(assert_whole(&*store, &key(SHARED, 0)), "it keeps its own");
    stores(&*store, 1);
    assert_eq!(fs::read_dir(&pool).unwrap().count(), 0);
    // A directory of a trusted user is followed.
    let new = root.path().join("new");
    drop(open(&new, CAPACITY));
    stores(&*open(&new, CAPACITY), 2);
    exchange(&pool, &new);
    assert_eq!(store.contains(&[key(SHARED, 2)], soon()).unwrap(), [true]);
}

#[test]
fn a_group_that_is_trusted_shares_a_directory() {
    if !is_root("a group's directory") {
        return;
    }
    let root = tempfile::tempdir().unwrap();
    chown(root.path(), None, Some(GROUP)).unwrap();
    allow(root.path(), 0o770);
    let open = || open_url(root.path(), "&trust=group");
    let error = open()
        .err()
        .expect("its group is not handed on")
        .to_string();
    assert!(error.contains("chmod g+rwxs"), "{error}");
    allow(root.path(), 0o2770);
    let store = open().unwrap();
    stores(&*store, 0);
    let value = path_of(root.path(), 0);
    // Whoever is in the group may read and remove all of it, whatever this process's umask is.
    for (path, mode) in [
        (value.clone(), 0o660),
        (value.parent().unwrap().to_owned(), 0o2770),
        (value.parent().unwrap().parent().unwrap().to_owned(), 0o2770),
        (root.path().join("tmp"), 0o2770),
        (root.path().join("usage"), 0o660),
        (root.path().join("evict.lock"), 0o660),
    ] {
        let there = fs::metadata(&path).unwrap();
        let found = (there.gid(), there.mode() & 0o7777);
        assert_eq!(found, (GROUP, mode), "{}", path.display());
    }
    // A value of another user is believed if it is the group's, and not if it is not.
    chown(&value, Some(OTHER), Some(GROUP)).unwrap();
    assert!(assert_whole(&*store, &key(SHARED, 0)));
    chown(&value, Some(OTHER), Some(OTHER)).unwrap();
    misses(&*store, 0);
    allow(root.path(), 0o2777);
    let error = open().err().expect("not a group's alone");
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
}
