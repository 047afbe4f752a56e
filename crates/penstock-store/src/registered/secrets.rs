//! What a foreign store must not repeat of its URL: in errors, in facts, and in the URL that it
//! shows.

use penstock_contract::{Error, ErrorKind, Result};
use percent_encoding::percent_decode;

/// Most of a foreign message that is passed on, in bytes.
const MESSAGE_LIMIT: usize = 500;
/// A part of a path is hidden if it may be a part of a password, and is so long. Shorter ones are in
/// every other word.
const SHORTEST_PART: usize = 4;

/// The parts of a URL after its scheme, as its grammar has them.
struct Parts<'u> {
    authority: &'u str,
    /// What follows the authority, with the `/`, `?` or `#` that ends that.
    rest: &'u str,
}

impl<'u> Parts<'u> {
    fn of(url: &'u str) -> Self {
        let (_, whole) = url.split_once("://").unwrap_or(("", url));
        let end = whole.find(['/', '?', '#']).unwrap_or(whole.len());
        let (authority, rest) = whole.split_at(end);
        Self { authority, rest }
    }

    fn password(&self) -> Option<&'u str> {
        let (user, _) = self.authority.rsplit_once('@')?;
        user.split_once(':').map(|(_, password)| password)
    }

    fn path(&self) -> &'u str {
        let end = self.rest.find(['?', '#']).unwrap_or(self.rest.len());
        &self.rest[..end]
    }

    fn query(&self) -> &'u str {
        self.rest.split_once('?').map_or("", |(_, query)| query)
    }

    /// What stands where the ports of hosts do.
    fn ports(&self) -> impl Iterator<Item = &'u str> {
        let hosts = self.authority.rsplit('@').next().unwrap_or_default();
        hosts.split(',').filter_map(|host| {
            // An IPv6 address has colons of its own.
            let after_address = host.rsplit(']').next().unwrap_or_default();
            after_address.rsplit_once(':').map(|(_, port)| port)
        })
    }

    /// What stands there, and is no port.
    fn no_ports(&self) -> impl Iterator<Item = &'u str> {
        self.ports()
            .filter(|port| !port.is_empty() && port.parse::<u16>().is_err())
    }
}

/// What foreign messages must not repeat of a URL.
pub(super) struct Secrets(Vec<Vec<u8>>);

impl Secrets {
    /// Fails if a URL cannot be read without taking a part of its password for something else, which
    /// a store would then show.
    pub(super) fn check(url: &str) -> Result<()> {
        let parts = Parts::of(url);
        if parts.rest.contains('@') && parts.no_ports().next().is_some() {
            return Err(Error::new(
                ErrorKind::Config,
                "the pool's URL has an @ after its host, and something else than a number for the \
                 host's port: write / in a password as %2F, ? as %3F, # as %23 and @ as %40",
            ));
        }
        Ok(())
    }

    /// The password of a URL, what may have been meant for one, and the values of parameters that
    /// are named like a secret.
    pub(super) fn of(url: &str) -> Self {
        let parts = Parts::of(url);
        let mut found: Vec<&str> = parts.password().into_iter().collect();
        found.extend(parts.no_ports());
        // Whoever writes a / as it is into a password means all that is before the last @.
        let has_authority = !parts.authority.is_empty();
        let whole = &url[url.len() - parts.authority.len() - parts.rest.len()..];
        if has_authority && let Some((before, _)) = whole.rsplit_once('@') {
            found.extend(before.split_once(':').map(|(_, password)| password));
        }
        if parts.ports().next().is_some() && !parts.authority.contains('@') {
            // The store takes the beginning for a port, and the rest for a path.
            let before = parts.path().rsplit_once('@').map_or("", |(path, _)| path);
            let pieces = before.split('/').chain([before.trim_start_matches('/')]);
            found.extend(pieces.filter(|piece| piece.len() >= SHORTEST_PART));
        }
        for parameter in parts.query().split('&') {
            if let Some((name, value)) = parameter.split_once('=')
                && is_named_like_one(name)
            {
                found.push(value);
                found.extend(value.split_once('#').map(|(value, _)| value));
            }
        }
        let mut secrets: Vec<Vec<u8>> = found.into_iter().flat_map(meanings).collect();
        secrets.retain(|secret| !secret.is_empty());
        secrets.sort();
        secrets.dedup();
        Self(secrets)
    }

    /// A foreign text without secrets, control characters and excess length.
    pub(super) fn hide(&self, text: &str) -> String {
        let (mut rest, mut hidden) = (text.as_bytes(), Vec::new());
        while let Some((byte, after)) = rest.split_first() {
            // More than is passed on: control characters may become shorter below.
            if hidden.len() > 4 * MESSAGE_LIMIT {
                break;
            }
            // One may be a part of another.
            let lengths = self.0.iter().filter_map(|secret| spelled(secret, rest));
            if let Some(length) = lengths.max() {
                hidden.extend(b"***");
                rest = &rest[length..];
            } else {
                hidden.push(*byte);
                rest = after;
            }
        }
        let mut line: String = String::from_utf8_lossy(&hidden)
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
    pub(super) fn error(&self, kind: &str, message: &str) -> Error {
        let kind = ErrorKind::named(kind).unwrap_or(ErrorKind::Unavailable);
        Error::new(kind, self.hide(message))
    }
}

fn is_named_like_one(name: &str) -> bool {
    let name = percent_decode(name.as_bytes()).decode_utf8_lossy();
    let name = name.to_ascii_lowercase();
    ["password", "secret", "token", "key", "credential"]
        .iter()
        .any(|word| name.contains(word))
}

/// What a secret of a URL may be to a store: as it stands there, decoded, and decoded as forms are,
/// where a `+` is a space. Bytes that are no text are often replaced.
fn meanings(secret: &str) -> Vec<Vec<u8>> {
    let form = secret.replace('+', " ");
    let mut meanings = vec![secret.as_bytes().to_vec()];
    for spelling in [secret, &form] {
        let decoded: Vec<u8> = percent_decode(spelling.as_bytes()).collect();
        meanings.push(String::from_utf8_lossy(&decoded).into_owned().into_bytes());
        meanings.push(decoded);
    }
    for meaning in &mut meanings {
        let end = meaning.iter().rposition(|byte| !is_space(*byte));
        meaning.truncate(end.map_or(0, |end| end + 1));
        let begin = meaning.iter().position(|byte| !is_space(*byte));
        meaning.drain(..begin.unwrap_or(0));
    }
    meanings
}

/// How many bytes a secret takes at the beginning of a text, if it is there. Each of its characters
/// may stand there as it is, percent-encoded, or behind a backslash. For its spaces and line
/// breaks, there may be any space.
fn spelled(secret: &[u8], text: &[u8]) -> Option<usize> {
    let mut rest = secret;
    // Where the secret may have been spelled up to `rest`: what is an escape to one is text to
    // another.
    let mut ends = vec![0];
    while let [first, others @ ..] = rest {
        let mut next = Vec::new();
        if is_space(*first) {
            let spaces = rest.iter().take_while(|byte| is_space(**byte));
            rest = &rest[spaces.count()..];
            for mut at in ends {
                while let Some(length) = space(&text[at..]) {
                    at += length;
                    next.push(at);
                }
            }
        } else {
            rest = others;
            for at in ends {
                next.extend(spellings(*first, &text[at..]).map(|length| at + length));
            }
        }
        next.sort_unstable();
        next.dedup();
        ends = next;
    }
    ends.last().copied()
}

fn is_space(byte: u8) -> bool {
    byte == b' ' || byte.is_ascii_control()
}

/// How many bytes a space takes at the beginning of a text, if there is one.
fn space(text: &[u8]) -> Option<usize> {
    match text {
        [b'+', ..] => Some(1),
        [byte, ..] if is_space(*byte) => Some(1),
        [b'\\', b'n' | b'r' | b't', ..] => Some(2),
        _ => encoded(text).filter(|byte| is_space(*byte)).map(|_| 3),
    }
}

/// How many bytes this byte takes at the beginning of a text, for each way to spell it that is there.
fn spellings(byte: u8, text: &[u8]) -> impl Iterator<Item = usize> {
    [
        (text.first() == Some(&byte), 1),
        (text.starts_with(&[b'\\', byte]), 2),
        (encoded(text) == Some(byte), 3),
    ]
    .into_iter()
    .filter_map(|(is_there, length)| is_there.then_some(length))
}

/// The byte that a text begins with, if that is percent-encoded.
fn encoded(text: &[u8]) -> Option<u8> {
    let [b'%', high, low, ..] = text else {
        return None;
    };
    let digit = |digit: &u8| char::from(*digit).to_digit(16);
    Some((digit(high)? << 4 | digit(low)?) as u8)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hidden(url: &str, text: &str) -> String {
        Secrets::of(url).hide(text)
    }

    #[test]
    fn secrets_of_a_url_are_not_repeated() {
        let secrets = Secrets::of("x://me:p%40ss@host/db?secret_key=s3&size=1GiB");
        assert_eq!(
            secrets.hide("p@ss and p%40ss to me@host/db with s3\n, 1GiB"),
            "*** and *** to me@host/db with *** , 1GiB"
        );
        assert_eq!(hidden("x://host:80/a@b:c", "host 80 c"), "host 80 c");
        assert_eq!(secrets.hide(&"ä".repeat(1000)).chars().count(), 251);
        assert_eq!(secrets.error("full", "so").kind(), ErrorKind::Full);
        assert_eq!(secrets.error("odd", "so").kind(), ErrorKind::Unavailable);
    }

    #[test]
    fn a_secret_is_hidden_however_it_is_spelled() {
        for (url, spellings) in [
            (
                "x://h/?token=a+b/c=",
                &["a+b/c=", "a b/c=", "a%20b%2fc%3D", "a%2Bb%2Fc%3d"][..],
            ),
            (
                "x://h/?To%6Ben=a%2Bb%2Fc%3D#fragment",
                &["a+b/c=", "a%2bb%2fc%3d", "%61%2B%62/c=", "a%2Bb%2Fc%3D"],
            ),
            ("x://me:p%2540%25@h", &["p%40%", "p%2540%25", "p%2540%"]),
            ("x://me:a%0A%09b%5C%27@h", &[r"a\n\tb\\\'", r"a b\'"]),
            ("x://me:%22%2525@h", &[r#"\"%25"#, r#""%2525"#]),
            ("x://me:x%FFé@h", &["x\u{fffd}é", "x%ff%C3%A9"]),
            // What is left of it on one line, and at its end.
            ("x://me:%20a%0A%20b%0A@h", &["a b"]),
            // A whole one goes before its part.
            ("x://me:ab@h?key=abc", &["abc", "ab"]),
        ] {
            for spelled in spellings {
                let said = format!("<{spelled}>");
                assert_eq!(hidden(url, &said), "<***>", "{url} {spelled}");
            }
        }
        assert_eq!(hidden("x://me:@h?key=&token=%20", "to me"), "to me");
    }

    #[test]
    fn a_password_with_a_slash_is_hidden_or_its_url_is_refused() {
        // A part of it passes for a port, and the rest for a path.
        let url = "x://me:7/word+ab@host/db?size=1GiB";
        Secrets::check(url).unwrap();
        for said in [url, "no file word+ab@host/db", "no file word ab@host/db"] {
            let without = hidden(url, said);
            assert!(
                !without.contains("word") && without.contains("host/db"),
                "{without}"
            );
        }
        for url in [
            "x://me:hunter/2@host/db",
            "x://me:123456/hunter2@host/db",
            "x://me:hunter?2@host",
            "x://me:hunter#2@host",
            "x://me:p@h:hunter/2@host",
            "x://a:80,b:hunter/2@host",
        ] {
            let said = Secrets::check(url).unwrap_err().to_string();
            assert!(said.contains("%2F") && !said.contains("hunter"), "{said}");
        }
        // Without an @, it may be one whose host was forgotten.
        assert_eq!(hidden("x://me:word/db", "no port word"), "no port ***");
    }

    #[test]
    fn urls_without_a_secret_are_shown_as_they_are() {
        for url in [
            "x://host",
            "x://host:80/a/b",
            "x://[::1]:80,[::2]/db@1",
            "x://host:80/db?mail=me@home",
            "x:///a:folder/c@d",
            "x://me@host/bucket@2",
            "x://",
            "x",
            "",
        ] {
            Secrets::check(url).unwrap();
            if !url.contains("80") {
                assert_eq!(hidden(url, url), url);
            }
        }
    }
}
