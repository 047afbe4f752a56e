//! Encryption of values with AES-256-GCM. Each value has its own AES key.
//!
//! HKDF-Expand (SHA-256) makes the AES key and the nonce of one value from the keyring's key, the
//! value's random salt and its context. So the number of values that one key of the keyring may
//! encrypt has no bound: a clash needs two values that draw the same 256 bits. (With one AES key
//! for all values and random 96-bit nonces, the bound would be 2^32 values. A fleet that stores
//! small objects reaches that.)
//!
//! The tag authenticates the payload, the object's key, and all of the header except the tag itself
//! and the checksums, which follow from the rest. [`crate::header`] describes the format.

use std::io::IoSliceMut;

use penstock_contract::{Error, ErrorKind, KEY_BYTES, Key, Result, slices};
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, Tag, UnboundKey};
use ring::hkdf::{HKDF_SHA256, KeyType, Prk};
use ring::rand::{SecureRandom, SystemRandom};
use zeroize::Zeroizing;

use crate::coded::{Coded, Whole};
use crate::compress::Element;
use crate::header::{
    self, Checksum, ENCRYPTED_HEADER_BYTES, Form, HEADER_BYTES, PAYLOAD_CHECKSUM_AT, Rejection,
};
use crate::keyring::{FINGERPRINT_BYTES, Keyring, SECRET_BYTES, Secret};
use crate::sealed::Label;

const FINGERPRINT_AT: usize = HEADER_BYTES;
const SALT_AT: usize = FINGERPRINT_AT + FINGERPRINT_BYTES;
const TAG_AT: usize = 112;
const SALT_BYTES: usize = TAG_AT - SALT_AT;

const VALUE_DOMAIN: &[u8] = b"penstock value 1";

/// Most payload bytes of one value. AES-GCM sets this bound.
pub const MAX_ENCRYPTED_PAYLOAD: u64 = (1 << 36) - 32;

impl Keyring {
    /// Encrypts a payload in place with the first key. Returns the header that goes in front of it.
    /// The label's context goes into the value's own key: a reader must know it to open the value.
    ///
    /// Fails with [`ErrorKind::Config`] if the payload is larger than [`MAX_ENCRYPTED_PAYLOAD`],
    /// and with [`ErrorKind::Io`] if the system gives no random bytes.
    pub fn seal(
        &self,
        label: Label<'_>,
        payload: &mut [u8],
    ) -> Result<[u8; ENCRYPTED_HEADER_BYTES]> {
        self.seal_form(label, payload, payload.len() as u64, None)
    }

    /// Encrypts in place what a value holds for its payload: the payload itself, or a code of it
    /// for elements of this type. The payload has `payload_len` bytes. Returns and fails as
    /// [`seal`](Self::seal) does.
    pub(crate) fn seal_form(
        &self,
        label: Label<'_>,
        content: &mut [u8],
        payload_len: u64,
        code: Option<Element>,
    ) -> Result<[u8; ENCRYPTED_HEADER_BYTES]> {
        let mut salt = [0; SALT_BYTES];
        SystemRandom::new().fill(&mut salt).map_err(|_| {
            Error::new(
                ErrorKind::Io,
                "the system gave no random bytes to encrypt with",
            )
        })?;
        self.seal_salted(label, salt, content, payload_len, code)
    }

    fn seal_salted(
        &self,
        label: Label<'_>,
        salt: [u8; SALT_BYTES],
        content: &mut [u8],
        payload_len: u64,
        code: Option<Element>,
    ) -> Result<[u8; ENCRYPTED_HEADER_BYTES]> {
        let Label {
            key,
            writer,
            context,
        } = label;
        let secret = self.first();
        let mut header = [0; ENCRYPTED_HEADER_BYTES];
        header[FINGERPRINT_AT..SALT_AT].copy_from_slice(&secret.fingerprint);
        header[SALT_AT..TAG_AT].copy_from_slice(&salt);
        let form = Form {
            is_encrypted: true,
            code,
        };
        // This leaves out the checksum of the header's second part. That checksum is not
        // authenticated, so it may be added at the end.
        let bare = header::seal_form(form, key, writer, payload_len, 0);
        header[..HEADER_BYTES].copy_from_slice(&bare);
        let (aead, nonce) = value_key(secret, &salt, context);
        let tag = aead
            .seal_in_place_separate_tag(nonce, Aad::from(associated_data(&header, key)), content)
            .map_err(|_| {
                Error::new(
                    ErrorKind::Config,
                    format!(
                        "a payload of {} bytes is larger than AES-GCM takes \
                         ({MAX_ENCRYPTED_PAYLOAD}): make objects smaller",
                        content.len()
                    ),
                )
            })?;
        header[TAG_AT..].copy_from_slice(tag.as_ref());
        let checksum = Checksum::of(&header[FINGERPRINT_AT..]);
        let checked = header::seal_form(form, key, writer, payload_len, checksum);
        header[..HEADER_BYTES].copy_from_slice(&checked);
        Ok(header)
    }

    /// Checks the beginning of an encrypted value against what the reader asked for. `beginning` is
    /// as much of the header as arrived.
    fn check(
        &self,
        beginning: &[u8],
        key: &Key,
        context: &[u8],
        expected_payload_len: u64,
    ) -> std::result::Result<Opener, Rejection> {
        let (header, code) = check_header(beginning, key, expected_payload_len)?;
        let secret = self
            .by_fingerprint(&header[FINGERPRINT_AT..SALT_AT])
            .ok_or(Rejection::UnknownKey)?;
        let (aead, nonce) = value_key(secret, &header[SALT_AT..TAG_AT], context);
        let mut tag = [0; ENCRYPTED_HEADER_BYTES - TAG_AT];
        tag.copy_from_slice(&header[TAG_AT..]);
        Ok(Opener {
            aead,
            nonce,
            associated_data: associated_data(header, key),
            tag: Tag::from(tag),
            code,
        })
    }

    /// Checks a whole value that is not coded, and decrypts its payload in place. The value is header
    /// and payload in one piece, with nothing after them. If this fails, the payload means nothing.
    pub fn open_value(
        &self,
        value: &mut [u8],
        key: &Key,
        context: &[u8],
        expected_payload_len: u64,
    ) -> std::result::Result<(), Rejection> {
        let bytes = value.len() as u64;
        let slices = &mut [IoSliceMut::new(value)];
        match self.open_slices(slices, bytes, key, context, expected_payload_len)? {
            Whole::Plain => Ok(()),
            Whole::Coded(_) => Err(Rejection::Coded),
        }
    }

    /// Checks a whole value of `value_bytes` bytes, coded or not, and decrypts what follows its
    /// header. The value lies in the slices from their start, with its header in the first slice. A
    /// payload in several slices is decrypted in a copy. Of a coded value, the code is decrypted.
    /// See [`open_value`](Self::open_value).
    pub(crate) fn open_slices(
        &self,
        slices: &mut [IoSliceMut<'_>],
        value_bytes: u64,
        key: &Key,
        context: &[u8],
        expected_payload_len: u64,
    ) -> std::result::Result<Whole, Rejection> {
        let beginning = header::beginning(slices, value_bytes);
        let opener = self.check(beginning, key, context, expected_payload_len)?;
        let whole = check_length(opener.code, value_bytes, expected_payload_len)?;
        let content = ENCRYPTED_HEADER_BYTES..value_bytes as usize;
        if let Some((slice, range)) = slices::one_piece(slices, content.clone()) {
            opener.open(&mut slices[slice][range])?;
            return Ok(whole);
        }
        let into = &mut slices::remaining_mut(slices, content.start);
        let mut copy = slices::first_bytes(into, content.len());
        opener.open(&mut copy)?;
        slices::scatter(&copy, into);
        Ok(whole)
    }
}

/// Checks an encrypted value as far as that needs no key: its header and its length, but not its
/// payload. The length of a code is known only roughly. The value is in one piece.
pub(crate) fn check_closed(value: &[u8], key: &Key) -> std::result::Result<(), Rejection> {
    let value_bytes = value.len() as u64;
    let payload_len = header::payload_len(value, value_bytes, ENCRYPTED_HEADER_BYTES);
    let (_, code) = check_header(value, key, payload_len)?;
    check_length(code, value_bytes, payload_len).map(|_| ())
}

/// Checks that a value is as long as its header and what follows it together. What it says of the
/// payload holds once it is decrypted.
fn check_length(
    code: Option<Element>,
    value_bytes: u64,
    payload_len: u64,
) -> std::result::Result<Whole, Rejection> {
    match code {
        Some(element) => {
            let header = ENCRYPTED_HEADER_BYTES;
            Coded::checked(element, header, value_bytes, payload_len, None).map(Whole::Coded)
        }
        None => header::check_length(ENCRYPTED_HEADER_BYTES, value_bytes, payload_len)
            .map(|()| Whole::Plain),
    }
}

/// Checks the header of an encrypted value against what the reader asked for. `beginning` is as
/// much of the value as arrived in one piece. Returns the header, and the type of the payload's
/// elements if it is coded.
fn check_header<'v>(
    beginning: &'v [u8],
    key: &Key,
    expected_payload_len: u64,
) -> std::result::Result<(&'v [u8; ENCRYPTED_HEADER_BYTES], Option<Element>), Rejection> {
    let truncated = Rejection::Truncated {
        expected: (ENCRYPTED_HEADER_BYTES as u64).saturating_add(expected_payload_len),
        found: beginning.len() as u64,
    };
    let first = beginning.first_chunk::<HEADER_BYTES>().ok_or(truncated)?;
    let (checksum, code) = header::verify_encrypted(first, key, expected_payload_len)?;
    let header = beginning
        .first_chunk::<ENCRYPTED_HEADER_BYTES>()
        .ok_or(truncated)?;
    if Checksum::of(&header[FINGERPRINT_AT..]) != checksum {
        return Err(Rejection::HeaderChecksum);
    }
    Ok((header, code))
}

/// Opens the payload of a value whose header has been checked.
#[must_use = "the payload is ciphertext until it is opened"]
struct Opener {
    aead: LessSafeKey,
    nonce: Nonce,
    associated_data: [u8; ASSOCIATED_BYTES],
    tag: Tag,
    /// The type of the payload's elements, if it is coded.
    code: Option<Element>,
}

impl Opener {
    /// Decrypts the payload in place. If this fails, the payload means nothing.
    fn open(self, payload: &mut [u8]) -> std::result::Result<(), Rejection> {
        let associated_data = Aad::from(self.associated_data);
        self.aead
            .open_in_place_separate_tag(self.nonce, associated_data, self.tag, payload, 0..)
            .map(|_| ())
            .map_err(|_| Rejection::Authentication)
    }
}

const ASSOCIATED_BYTES: usize = PAYLOAD_CHECKSUM_AT + (TAG_AT - FINGERPRINT_AT) + KEY_BYTES;

fn associated_data(header: &[u8; ENCRYPTED_HEADER_BYTES], key: &Key) -> [u8; ASSOCIATED_BYTES] {
    let mut data = [0; ASSOCIATED_BYTES];
    let (start, rest) = data.split_at_mut(PAYLOAD_CHECKSUM_AT);
    let (extension, key_bytes) = rest.split_at_mut(TAG_AT - FINGERPRINT_AT);
    start.copy_from_slice(&header[..PAYLOAD_CHECKSUM_AT]);
    extension.copy_from_slice(&header[FINGERPRINT_AT..TAG_AT]);
    key_bytes.copy_from_slice(&key.to_bytes());
    data
}

/// The length of an AES-256 key and a nonce together.
struct ValueKey;

impl KeyType for ValueKey {
    fn len(&self) -> usize {
        SECRET_BYTES + NONCE_LEN
    }
}

/// The AES key of one value, and the only nonce that is used with that key.
fn value_key(secret: &Secret, salt: &[u8], context: &[u8]) -> (LessSafeKey, Nonce) {
    // All salts have the same length, so different pairs of salt and context never make the same
    // text.
    let info = [VALUE_DOMAIN, salt, context];
    let mut material = Zeroizing::new([0_u8; SECRET_BYTES + NONCE_LEN]);
    Prk::new_less_safe(HKDF_SHA256, secret.bytes.as_slice())
        .expand(&info, ValueKey)
        .and_then(|okm| okm.fill(&mut *material))
        .expect("a length that HKDF gives");
    let (key, nonce) = material.split_at(SECRET_BYTES);
    let key = UnboundKey::new(&AES_256_GCM, key).expect("a key of AES-256's length");
    let nonce = Nonce::try_assume_unique_for_key(nonce).expect("a nonce of AES-GCM's length");
    (LessSafeKey::new(key), nonce)
}

#[cfg(test)]
mod tests {
    use penstock_contract::Namespace;
    use penstock_layout::Span;

    use super::*;
    use crate::header::Writer;

    #[test]
    fn the_format_is_what_it_was() {
        let line = "test:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
        let keys = Keyring::parse(line).unwrap();
        let key = Key::new(
            Namespace(*b"0123456789abcdef"),
            b"chunk",
            Span::new(0..2, 1..5).unwrap(),
        )
        .unwrap();
        let mut payload = *b"keys and values";
        let header = keys
            .seal_salted(
                Label {
                    key: &key,
                    writer: Writer(0x77),
                    context: b"tenant",
                },
                [0x5a; SALT_BYTES],
                &mut payload,
                15,
                None,
            )
            .unwrap();
        let hex: String = header
            .iter()
            .chain(&payload)
            .map(|byte| format!("{byte:02x}"))
            .collect();
        // Another library made the same bytes from the description in `docs/reference/values.md`.
        assert_eq!(
            hex,
            "504e534b020001000f0000000000000030313233343536373839616263646566\
             fda2b477801b14907700000000000000ec2930d0d3caedddf4f511e3cabb2b49\
             130fb9343bea646112c3866ee6768d8f5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a\
             5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a6903bd7dee39fba298e4906cf0f939b3\
             aefac4f8d87486afa170054278430f"
        );
    }
}
