//! Sealing and verifying values.

use penstock_contract::{Key, Namespace, testing};
use penstock_layout::Span;
use penstock_value::header::{
    Checksum, HEADER_BYTES, Rejection, Writer, seal, verify, verify_value,
};
use proptest::collection::vec;
use proptest::prelude::*;

fn key() -> Key {
    testing::key(Namespace([7; 16]), 3)
}

fn sealed(key: &Key, payload: &[u8]) -> Vec<u8> {
    let header = seal(key, Writer(5), payload.len() as u64, Checksum::of(payload));
    [&header[..], payload].concat()
}

/// Seals anew a header that a test has changed.
fn with_header_checksum(mut header: [u8; HEADER_BYTES]) -> [u8; HEADER_BYTES] {
    let checksum = Checksum::of(&header[..56]);
    header[56..].copy_from_slice(&checksum.to_le_bytes());
    header
}

#[test]
fn the_format_is_what_it_was() {
    let namespace = Namespace(*b"0123456789abcdef");
    let key = Key::new(namespace, b"chunk", Span::new(0..2, 1..5).unwrap()).unwrap();
    let header = seal(
        &key,
        Writer(0x0a0b_0c0d_0e0f),
        0x0102,
        0x1122_3344_5566_7788,
    );
    let hex: String = header.iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(
        hex,
        "504e534b02000000020100000000000030313233343536373839616263646566\
         fda2b477801b14900f0e0d0c0b0a000088776655443322111cc67eee06ff21ff"
    );
    assert_eq!(Checksum::of(b"penstock"), 18_111_801_501_147_755_303);
}

#[test]
fn every_kind_of_rejection() {
    let payload = testing::bytes(1, 1000);
    let value = sealed(&key(), &payload);
    let header: [u8; HEADER_BYTES] = value[..HEADER_BYTES].try_into().unwrap();
    assert_eq!(verify_value(&value, &key(), 1000), Ok(()));

    for len in [0, 1, 63, 64, 1063] {
        let (expected, found) = (1064, len as u64);
        let rejection = verify_value(&value[..len], &key(), 1000).unwrap_err();
        assert_eq!(rejection, Rejection::Truncated { expected, found });
    }
    let mut longer = value.clone();
    longer.push(0);
    let length = Rejection::Length {
        expected: 1000,
        found: 1001,
    };
    assert_eq!(verify_value(&longer, &key(), 1000), Err(length));
    let length = Rejection::Length {
        expected: 999,
        found: 1000,
    };
    assert_eq!(verify_value(&value, &key(), 999), Err(length));

    let changed = |at: usize, to: u8| {
        let mut header = header;
        header[at] = to;
        verify(&with_header_checksum(header), &key(), 1000).err()
    };
    assert_eq!(changed(0, b'p'), Some(Rejection::BadMagic));
    assert_eq!(changed(4, 1), Some(Rejection::Version { found: 1 }));
    assert_eq!(changed(7, 0x80), Some(Rejection::Flags { found: 0x8000 }));
    assert_eq!(
        changed(15, 1),
        Some(Rejection::Length {
            expected: 1000,
            found: 1000 + (1 << 56)
        })
    );

    let mut damaged = header;
    damaged[20] ^= 1;
    assert_eq!(
        verify(&damaged, &key(), 1000),
        Err(Rejection::HeaderChecksum)
    );

    let other = testing::key(Namespace([8; 16]), 3);
    assert_eq!(
        verify_value(&value, &other, 1000),
        Err(Rejection::Namespace)
    );
    let other_spans = Key {
        span: Span::new(0..4, 0..1).unwrap(),
        ..key()
    };
    for other in [testing::key(Namespace([7; 16]), 4), other_spans] {
        assert_eq!(verify_value(&value, &other, 1000), Err(Rejection::Key));
    }

    let expected = verify(&header, &key(), 1000).unwrap();
    assert_eq!(expected.check(Checksum::of(&payload)), Ok(()));
    assert_eq!(expected.check(0), Err(Rejection::PayloadChecksum));
}

#[test]
fn any_flipped_header_bit_is_rejected() {
    let value = sealed(&key(), b"payload");
    for bit in 0..HEADER_BYTES * 8 {
        let mut value = value.clone();
        value[bit / 8] ^= 1 << (bit % 8);
        assert!(verify_value(&value, &key(), 7).is_err(), "bit {bit}");
    }
}

proptest! {
    #[test]
    fn what_is_sealed_verifies(payload in vec(any::<u8>(), 0..5000)) {
        let value = sealed(&key(), &payload);
        prop_assert_eq!(verify_value(&value, &key(), payload.len() as u64), Ok(()));
    }

    #[test]
    fn flipped_payload_bits_are_rejected(
        payload in vec(any::<u8>(), 1..5000),
        at in any::<prop::sample::Index>(),
        flip in 1u8..,
    ) {
        let mut value = sealed(&key(), &payload);
        value[HEADER_BYTES + at.index(payload.len())] ^= flip;
        let verdict = verify_value(&value, &key(), payload.len() as u64);
        prop_assert_eq!(verdict, Err(Rejection::PayloadChecksum));
    }

    #[test]
    fn garbage_is_rejected(value in vec(any::<u8>(), 0..300), expected in any::<u64>()) {
        prop_assert!(verify_value(&value, &key(), expected).is_err());
    }

    #[test]
    fn garbage_that_begins_well_is_rejected(
        known in 0usize..64,
        mut rest in vec(any::<u8>(), 64..300),
        expected in any::<u64>(),
    ) {
        let header = seal(&key(), Writer(5), 100, 1);
        rest[..known].copy_from_slice(&header[..known]);
        prop_assert!(verify_value(&rest, &key(), expected).is_err());
    }

    #[test]
    fn how_a_payload_is_cut_does_not_matter(pieces in vec(vec(any::<u8>(), 0..700), 0..12)) {
        let mut checksum = Checksum::new();
        pieces.iter().for_each(|piece| checksum.update(piece));
        prop_assert_eq!(checksum.finish(), Checksum::of(&pieces.concat()));
    }
}
