//! Opening by URL.

use penstock_store::{ErrorKind, OpenOptions, open};

fn fails(url: &str) -> String {
    match open(url, &OpenOptions::default()) {
        Ok(store) => panic!("{url} opened as {}", store.url()),
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::Config, "{url}: {error}");
            error.to_string()
        }
    }
}

#[test]
fn each_kind_opens_and_says_so() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("with space & é");
    let file = url::Url::from_file_path(&path).unwrap();
    for (url, shown) in [
        (
            "memory://?size=1MiB".to_owned(),
            "memory://?size=1048576".to_owned(),
        ),
        (format!("{file}?size=1G"), format!("{file}?size=1073741824")),
        (
            "redis://me:hunter2@127.0.0.1:1/2".to_owned(),
            "redis://127.0.0.1:1/2".to_owned(),
        ),
        (
            "unix:///nowhere.sock?db=3".to_owned(),
            "unix:///nowhere.sock?db=3".to_owned(),
        ),
    ] {
        let store = open(&url, &OpenOptions::default()).unwrap();
        assert_eq!(store.url(), shown);
        // What a store calls itself opens it.
        assert_eq!(open(&shown, &OpenOptions::default()).unwrap().url(), shown);
    }
    assert!(path.join("tmp").is_dir());
}

#[test]
fn a_file_pool_without_a_size_gets_one_that_the_disk_can_hold() {
    let root = tempfile::tempdir().unwrap();
    let url = format!("file://{}", root.path().display());
    let store = open(&url, &OpenOptions::default()).unwrap();
    let limit = store.capabilities().max_value_bytes;
    assert!((1..=10 << 30).contains(&limit), "{limit}");
}

#[test]
fn what_is_not_a_pool_is_refused_with_what_would_be() {
    for url in [
        "",
        "pool",
        "http://h/",
        "/absolute/path",
        "s3://bucket",
        "FILE",
        "://",
    ] {
        let message = fails(url);
        for accepted in [
            "memory://",
            "shm://",
            "file:///",
            "valkey://",
            "redis://",
            "unix:///",
        ] {
            assert!(message.contains(accepted), "{url}: {message}");
        }
    }
    for url in [
        "memory://",
        "memory://?size=0",
        "memory://?size=lots",
        "memory://?size=1G&size=2G",
        "memory://?sise=1G",
        "memory://host?size=1G",
        "memory:///path?size=1G",
        "file://relative/path",
        "file:relative/path",
        "file:/one/slash",
        "file:///",
        "file:///pool?size=",
        "file:///pool?bytes=1",
        "file:///pool?size=1G#x",
    ] {
        fails(url);
    }
    assert!(fails("rediss://h?ca=/nowhere.pem").contains("nowhere.pem"));
}

#[test]
fn errors_do_not_repeat_passwords() {
    for url in [
        "http://me:hunter2@h",
        "me:hunter2@h",
        "memory://me:hunter2@h?size=1G",
        "memory://me:hunter2@?size=1G",
        "file://me:hunter2@/pool",
        "rediss://me:hunter2@h?ca=/nowhere.pem",
        "redis://me:hunter2@h:notaport",
    ] {
        let message = fails(url);
        assert!(!message.contains("hunter2"), "{message}");
    }
}
