//! Names inside a pool's directory.
//!
//! A value is `<namespace>/<first byte of the chunk>/<chunk>.<span>`, with all digests in
//! hexadecimal. Beside the namespaces lie `usage`, `evict.lock` and `tmp/`. Anything else in the
//! directory is neither read nor touched.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use crate::{KEY_PREFIX, Key, Namespace};

/// Where the value of this key lies.
pub(super) fn value_path(root: &Path, key: &Key) -> PathBuf {
    // The text form is `penstock:<namespace>:<chunk>:<span>`; a path is built from its parts.
    let text = key.to_string();
    let mut parts = text[KEY_PREFIX.len()..].splitn(3, ':');
    let mut part = || parts.next().unwrap_or_default();
    let (namespace, chunk, span) = (part(), part(), part());
    let mut path = PathBuf::with_capacity(root.as_os_str().len() + text.len());
    path.push(root);
    path.push(namespace);
    path.push(&chunk[..2]);
    path.push(chunk);
    path.as_mut_os_string().push(".");
    path.as_mut_os_string().push(span);
    path
}

/// The namespace whose directory has this name.
pub(super) fn namespace_of(directory: &OsStr) -> Option<Namespace> {
    Namespace::parse(directory.to_str()?).ok()
}

/// The key whose value has this name in a directory of this namespace.
pub(crate) fn key_of(namespace: Namespace, file: &OsStr) -> Option<Key> {
    let (chunk, span) = file.to_str()?.split_once('.')?;
    Key::parse(&format!("{KEY_PREFIX}{namespace}:{chunk}:{span}")).ok()
}

#[cfg(test)]
mod tests {
    use penstock_layout::Span;

    use super::*;

    #[test]
    fn a_path_leads_back_to_its_key() {
        let namespace = Namespace([0xa5; 16]);
        let key = Key::new(namespace, &[0x0f; 32], Span::new(0..48, 2..4).unwrap()).unwrap();
        let path = value_path(Path::new("/pool"), &key);
        let chunk = "0f".repeat(32);
        assert_eq!(
            path,
            Path::new(&format!("/pool/{}/0f/{chunk}.l0-48.h2-4", "a5".repeat(16)))
        );
        assert_eq!(key_of(namespace, path.file_name().unwrap()), Some(key));
        assert_eq!(namespace_of(OsStr::new(&"a5".repeat(16))), Some(namespace));
    }

    #[test]
    fn other_names_are_not_ours() {
        for name in ["", "usage", "tmp", "0f.l0-1.h0-1", ".", "notes.txt"] {
            assert_eq!(key_of(Namespace([0; 16]), OsStr::new(name)), None, "{name}");
            assert_eq!(namespace_of(OsStr::new(name)), None, "{name}");
        }
    }
}
