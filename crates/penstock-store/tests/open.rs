//! Opening by URL.

use penstock_contract::ErrorKind;
use penstock_store::{OpenOptions, open, schemes, unknown_schemes};

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
        "s4://bucket",
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
            "s3://",
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
        "memory://?quota=tenant/red:1M",
        "s3://bucket?quota=tenant/red:1M",
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

#[test]
fn a_quota_that_is_none_is_refused_with_what_would_be() {
    let namespace = "ab".repeat(16);
    for quota in [
        "",
        "1GiB",
        "red:1GiB",
        "tenant/red",
        "tenant/:1GiB",
        "tenant/a b:1GiB",
        "tenant/red:0",
        "tenant/red:1G&quota=tenant/red:2G",
        "tenant/*:1G&quota=tenant/*:1G",
        "user/red:1GiB",
        "namespace/ab:1GiB",
        "namespace/*:1GiB",
        &format!(
            "namespace/{namespace}:1G&quota=namespace/{}:1G",
            "AB".repeat(16)
        ),
    ] {
        for pool in [
            "memory://?size=1M",
            "file:///nowhere/pool?size=1M",
            "shm://none?size=1M",
        ] {
            let message = fails(&format!("{pool}&quota={quota}"));
            for accepted in ["tenant/NAME:", "tenant/*:", "namespace/HEX:", "pool ls"] {
                assert!(message.contains(accepted), "{quota}: {message}");
            }
        }
    }
    assert!(fails("memory://?size=1M&quota=tenant/red:lots").contains("not a size: \"lots\""));
}

#[test]
fn servers_take_no_quotas() {
    for url in [
        "redis://h?quota=tenant/red:1GiB",
        "valkeys://h/1?name=x&quota=tenant/red:1GiB",
        "valkey+cluster://a,b?quota=tenant/*:1GiB",
        "redis+sentinel://a,b/master?quota=namespace/0:1GiB",
        "unix:///nowhere.sock?db=1&quota=tenant/*:1GiB",
        "memory://?size=1MiB redis://h?quota=tenant/*:1GiB",
    ] {
        let message = fails(url);
        for said in ["server's pool takes no quotas", "maxmemory", "shm://"] {
            assert!(message.contains(said), "{url}: {message}");
        }
    }
    assert!(!fails("http://h?quota=tenant/*:1GiB").contains("server's pool"));
}

#[test]
fn every_scheme_is_known_and_quotas_are_kept_or_refused() {
    let all: Vec<&str> = schemes().collect();
    assert!(all.len() > 15 && all.contains(&"unix") && all.contains(&"rediss+cluster"));
    for scheme in all {
        // Nothing of it is right but the scheme.
        let url = format!("{scheme}://?{scheme}=x");
        assert_eq!(unknown_schemes(&url), [""; 0]);
        assert!(!fails(&url).contains("no store has the scheme"), "{url}");
        let message = fails(&format!("{url}&quota=tenant/red:lots"));
        let is_bounded = ["memory", "file", "shm"].contains(&scheme);
        assert_eq!(message.contains("not a size"), is_bounded, "{message}");
        assert_eq!(message.contains("no quotas"), !is_bounded, "{message}");
    }
}
