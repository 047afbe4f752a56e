//! Stores that others bring: from a library in this process, or from a program beside it.

#[cfg(test)]
pub(crate) mod fuzz;
mod link;
mod native;
mod process;
mod program;
mod protocol;
mod replies;

use std::sync::Arc;

use percent_encoding::percent_decode_str;

use self::native::NativeStore;
use self::program::ProgramStore;
use crate::options::{OpenOptions, Place};
use crate::{Error, ErrorKind, Result, Store};

/// Most of a foreign message that is passed on, in bytes.
const MESSAGE_LIMIT: usize = 500;

/// Opens the registered store of a URL's scheme. None if there is none.
pub(crate) fn open(
    scheme: &str,
    url: &str,
    options: &OpenOptions,
) -> Option<Result<Arc<dyn Store>>> {
    let registered = options
        .registered
        .iter()
        .find(|each| each.scheme == scheme)?;
    let secrets = Secrets::of(url);
    let opened: Result<Arc<dyn Store>> = match &registered.place {
        Place::Library(path) => {
            NativeStore::open(path, url, secrets).map(|store| Arc::new(store) as _)
        }
        Place::Program(command) => {
            ProgramStore::open(command, url, secrets).map(|store| Arc::new(store) as _)
        }
        Place::Nowhere(why) => Err(Error::new(ErrorKind::Config, why)),
    };
    Some(opened.map_err(|error| {
        error
            .with("scheme", scheme)
            .with("brought by", &registered.origin)
    }))
}

/// What foreign messages must not repeat of a URL.
struct Secrets(Vec<String>);

impl Secrets {
    /// The password of a URL, as it stands there and as it is meant, and the values of parameters
    /// that are named like a secret.
    fn of(url: &str) -> Self {
        let (_, rest) = url.split_once("://").unwrap_or(("", url));
        let authority_end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
        let user = rest[..authority_end].rsplit_once('@');
        let password = user.and_then(|(user, _)| user.split_once(':'));
        let query = rest.split_once('?').map_or("", |(_, query)| query);
        let parameters = query.split('&').filter_map(|part| part.split_once('='));
        let named = parameters.filter(|(name, _)| Self::is_named_like_one(name));
        let found = password.into_iter().chain(named).map(|(_, secret)| secret);
        let mut secrets: Vec<String> = found
            .flat_map(|secret| {
                let meant = percent_decode_str(secret).decode_utf8_lossy();
                [secret.to_owned(), meant.into_owned()]
            })
            .filter(|secret| !secret.is_empty())
            .collect();
        // The longest first: one may be a part of another.
        secrets.sort_by_key(|secret| std::cmp::Reverse(secret.len()));
        Self(secrets)
    }

    fn is_named_like_one(name: &str) -> bool {
        let name = name.to_ascii_lowercase();
        ["password", "secret", "token", "key", "credential"]
            .iter()
            .any(|word| name.contains(word))
    }

    /// A foreign text without secrets, control characters and excess length.
    fn hide(&self, text: &str) -> String {
        let hidden = self
            .0
            .iter()
            .fold(text.to_owned(), |text, secret| text.replace(secret, "***"));
        let mut line: String = hidden
            .chars()
            .map(|c| if c.is_control() { ' ' } else { c })
            .collect();
        if line.len() > MESSAGE_LIMIT {
            let end = (0..=MESSAGE_LIMIT).rfind(|&at| line.is_char_boundary(at));
            line.truncate(end.unwrap_or_default());
            line.push('…');
        }
        line
    }

    /// A foreign failure, of the kind that is named, if there is such a kind.
    fn error(&self, kind: &str, message: &str) -> Error {
        let kind = ErrorKind::named(kind).unwrap_or(ErrorKind::Unavailable);
        Error::new(kind, self.hide(message))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_of_a_url_are_not_repeated() {
        let secrets = Secrets::of("x://me:p%40ss@host/db?secret_key=s3&size=1GiB");
        assert_eq!(
            secrets.hide("p@ss and p%40ss to me@host/db with s3\n, 1GiB"),
            "*** and *** to me@host/db with *** , 1GiB"
        );
        assert_eq!(
            Secrets::of("x://host:80/a@b:c").hide("host 80 c"),
            "host 80 c"
        );
        assert_eq!(secrets.hide(&"ä".repeat(1000)).chars().count(), 251);
        assert_eq!(secrets.error("full", "so").kind(), ErrorKind::Full);
        assert_eq!(secrets.error("odd", "so").kind(), ErrorKind::Unavailable);
    }
}
