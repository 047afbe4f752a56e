//! Names inside a pool's directory.
//!
//! A value is `<namespace>/<first byte of the chunk>/<chunk>.<span>`, with all digests in
//! hexadecimal. Beside the namespaces lie `usage`, `evict.lock` and `tmp/`. Anything else in the
//! directory is neither read nor touched.

use penstock_contract::{KEY_PREFIX, Key, NAMESPACE_BYTES, Namespace};

/// The folder of the values in the making.
pub(super) const TEMPORARIES: &str = "tmp";

/// Where namespace, shard and file begin and end in a value's path.
const NAMESPACE_END: usize = NAMESPACE_BYTES * 2;
const SHARD_END: usize = NAMESPACE_END + 3;

/// Where a value lies, from the pool's directory on.
pub(super) struct ValuePath(String);

impl ValuePath {
    pub(super) fn of(key: &Key) -> Self {
        // The text form is `penstock:<namespace>:<chunk>:<span>`; a path is built from its parts.
        let text = key.to_string();
        let mut parts = text[KEY_PREFIX.len()..].splitn(3, ':');
        let mut part = || parts.next().unwrap_or_default();
        let (namespace, chunk, span) = (part(), part(), part());
        Self(format!("{namespace}/{}/{chunk}.{span}", &chunk[..2]))
    }

    pub(super) fn as_str(&self) -> &str {
        &self.0
    }

    pub(super) fn namespace(&self) -> &str {
        &self.0[..NAMESPACE_END]
    }

    pub(super) fn shard(&self) -> &str {
        &self.0[NAMESPACE_END + 1..SHARD_END]
    }

    pub(super) fn file(&self) -> &str {
        &self.0[SHARD_END + 1..]
    }
}

/// The namespace whose directory has this name.
pub(super) fn namespace_of(directory: &str) -> Option<Namespace> {
    Namespace::parse(directory).ok()
}

/// The key whose value has this name in a directory of this namespace.
pub(crate) fn key_of(namespace: Namespace, file: &str) -> Option<Key> {
    let (chunk, span) = file.split_once('.')?;
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
        let path = ValuePath::of(&key);
        let (hex, chunk) = ("a5".repeat(16), "0f".repeat(32));
        let file = format!("{chunk}.l0-48.h2-4");
        assert_eq!(path.as_str(), format!("{hex}/0f/{file}"));
        assert_eq!(
            (path.namespace(), path.shard(), path.file()),
            (&*hex, "0f", &*file)
        );
        assert_eq!(key_of(namespace, path.file()), Some(key));
        assert_eq!(namespace_of(path.namespace()), Some(namespace));
    }

    #[test]
    fn other_names_are_not_ours() {
        for name in ["", "usage", "tmp", "0f.l0-1.h0-1", ".", "notes.txt"] {
            assert_eq!(key_of(Namespace([0; 16]), name), None, "{name}");
            assert_eq!(namespace_of(name), None, "{name}");
        }
    }
}
