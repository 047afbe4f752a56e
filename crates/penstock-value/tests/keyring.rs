//! Keyrings: what is read, what is refused, and that no message shows a key.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use penstock_contract::ErrorKind;
use penstock_value::Keyring;

const A: &str = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
const B: &str = "//79/Pv6+fj39vX08/Lx8O/u7ezr6uno5+bl5OPi4eA=";

fn refusal(text: &str) -> String {
    let error = Keyring::parse(text).expect_err(text);
    assert_eq!(error.kind(), ErrorKind::Config);
    error.to_string()
}

#[test]
fn lines_comments_and_blanks_are_read() {
    let text = format!("# made in November\n\n  2026-11: {B}\nold_1.a:{A}\r\n");
    let keys = Keyring::parse(&text).unwrap();
    let ids: Vec<&str> = keys.fingerprints().into_iter().map(|(id, _)| id).collect();
    assert_eq!(ids, ["2026-11", "old_1.a"]);
    assert_eq!(format!("{keys:?}"), r#"Keyring["2026-11", "old_1.a"]"#);
}

#[test]
fn a_fingerprint_is_of_the_key_and_not_of_its_name() {
    let of = |text: String| Keyring::parse(&text).unwrap().fingerprints()[0].1.clone();
    let fingerprint = of(format!("x:{A}"));
    assert_eq!(fingerprint, of(format!("y:{A}")));
    assert_ne!(fingerprint, of(format!("x:{B}")));
    assert_eq!(fingerprint.len(), 32);
    let same =
        |one: &str, other: &str| Keyring::parse(one).unwrap() == Keyring::parse(other).unwrap();
    assert!(same(&format!("x:{A}"), &format!("y:{A}")));
    assert!(!same(&format!("x:{A}"), &format!("x:{A}\ny:{B}")));
}

#[test]
fn what_is_wrong_is_said_without_the_key() {
    let long = "i".repeat(33);
    let cases = [
        (String::new(), "no encryption key"),
        ("# nothing\n\n".to_owned(), "no encryption key"),
        (A.to_owned(), "line 1 of the keys: it has no ':'"),
        (
            format!("good:{B}\n{A}"),
            "line 2 of the keys: it has no ':'",
        ),
        (format!("{A}:id"), "an id is 1 to 32 letters"),
        (format!(":{A}"), "an id is"),
        (format!("{long}:{A}"), "an id is"),
        (format!("a b:{A}"), "an id is"),
        (format!("k:{}", &A[..40]), "\"k\" is the text of 30 bytes"),
        (format!("k:{}", &A[..43]), "malformed"),
        (format!("k:{A}{A}"), "malformed"),
        (format!("k:{}", A.replace("AAEC", "A?EC")), "malformed"),
        (
            format!("k:{}", "0123456789abcdef".repeat(4)),
            "the text of 48 bytes",
        ),
        (
            format!("k:{}", "A".repeat(4000)),
            "malformed or much too long",
        ),
        ("k:".to_owned(), "the text of 0 bytes"),
        (
            format!("k:{A}\nk:{B}"),
            "line 2 of the keys: the id or the key of \"k\"",
        ),
        (format!("k:{A}\nl:{A}"), "of \"k\" for a second time"),
    ];
    for (text, expected) in cases {
        let message = refusal(&text);
        assert!(message.contains(expected), "{message}");
        for secret in [A, B] {
            let shown = (0..secret.len() - 6).any(|at| message.contains(&secret[at..at + 6]));
            assert!(!shown, "a key is in: {message}");
        }
    }
}

fn file(folder: &Path, content: &[u8], mode: u32) -> PathBuf {
    let path = folder.join(format!("keys-{mode:o}-{}", content.len()));
    fs::write(&path, content).unwrap();
    fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
    path
}

#[test]
fn files_that_others_may_read_or_write_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let text = format!("k:{A}\n");
    for mode in [0o400, 0o600, 0o440, 0o640, 0o700] {
        let path = file(folder.path(), text.as_bytes(), mode);
        let keys = Keyring::load(Some(&path)).unwrap().unwrap();
        assert_eq!(keys.fingerprints()[0].0, "k");
    }
    for mode in [0o644, 0o660, 0o604, 0o602, 0o620, 0o601] {
        let path = file(folder.path(), text.as_bytes(), mode);
        let error = Keyring::load(Some(&path)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
        let message = error.to_string();
        assert!(message.contains(&format!("mode {mode:03o}")), "{message}");
        assert!(message.contains("chmod 600"), "{message}");
        assert!(message.contains(path.to_str().unwrap()), "{message}");
    }
}

#[test]
fn files_that_are_no_keyring_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let refused = |content: &[u8]| {
        let path = file(folder.path(), content, 0o600);
        let error = Keyring::load(Some(&path)).unwrap_err();
        assert!(error.to_string().contains("keys-600"), "{error}");
        error.kind()
    };
    assert_eq!(refused(b""), ErrorKind::Config);
    assert_eq!(refused(b"k:\xff\xfe"), ErrorKind::Config);
    assert_eq!(refused(&vec![b'#'; 100 << 10]), ErrorKind::Config);
    let error = Keyring::load(Some(&folder.path().join("none"))).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Io);
}
