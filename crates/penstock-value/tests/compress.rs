//! The coders of `compress`: what is decoded is what was encoded, whatever it was.

use penstock_value::compress::{
    CHUNK_ELEMENTS, Element, Speed, decode, decode_at, encode, encode_at,
};
use proptest::prelude::*;

/// Random numbers that look normal, in a sequence that a seed decides.
struct Normal(u64);

impl Normal {
    fn uniform(&mut self) -> f32 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (self.0 >> 40) as f32 / (1 << 24) as f32
    }

    fn next(&mut self) -> f32 {
        (0..12).map(|_| self.uniform()).sum::<f32>() - 6.0
    }
}

fn bf16(value: f32) -> [u8; 2] {
    ((value.to_bits() >> 16) as u16).to_le_bytes()
}

fn gaussian(elements: usize) -> Vec<u8> {
    let mut normal = Normal(1);
    (0..elements).flat_map(|_| bf16(normal.next())).collect()
}

/// The code of a payload, if it shrinks: the same with all instructions, and decoded by all.
fn coded(element: Element, payload: &[u8]) -> Option<Vec<u8>> {
    let mut out = vec![0xa5; payload.len()];
    let code = encode(element, payload, &mut out).map(|bytes| out[..bytes].to_vec());
    for speed in Speed::available() {
        let mut other = vec![0x5a; payload.len()];
        let same = encode_at(speed, element, payload, &mut other);
        assert_eq!(code.as_deref(), same.map(|bytes| &other[..bytes]));
    }
    if let Some(code) = &code {
        assert!(code.len() < payload.len());
        for speed in Speed::available() {
            let mut back = vec![0xa5; payload.len()];
            decode_at(speed, element, code, &mut back).unwrap();
            assert!(back == payload, "{element:?} with {}", speed.name());
        }
    }
    code
}

/// Elements whose bits are `spread` around the same ones: with a small spread few are escapes.
fn payloads() -> impl Strategy<Value = Vec<u8>> {
    let lengths = prop_oneof![
        0..2_000_usize,
        Just(2 * CHUNK_ELEMENTS),
        2 * CHUNK_ELEMENTS - 700..2 * CHUNK_ELEMENTS + 700,
        70_000..72_000_usize,
    ];
    (lengths, any::<u64>(), any::<[u8; 2]>(), 0..1000_u32).prop_map(
        |(length, seed, usual, unusual)| {
            let mut random = Normal(seed);
            (0..length)
                .map(|at| {
                    let noise = (random.uniform() * 256.0) as u8;
                    // An element's high byte keeps its exponent, but for some.
                    let is_unusual = random.uniform() * 4000.0 < unusual as f32;
                    let keep = if at % 2 == 0 || is_unusual { 0 } else { 0x78 };
                    usual[at % 2] & keep | noise & !keep
                })
                .collect()
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn what_is_decoded_is_what_was_encoded(payload in payloads()) {
        for element in Element::ALL {
            coded(element, &payload);
        }
    }

    #[test]
    fn any_bytes_come_back(payload in prop::collection::vec(any::<u8>(), 0..4000)) {
        for element in Element::ALL {
            coded(element, &payload);
        }
    }

    #[test]
    fn what_is_cut_off_or_longer_is_damaged(cut in 1..3000_usize) {
        let payload = gaussian(2000);
        let code = coded(Element::Bf16, &payload).unwrap();
        let mut back = vec![0; payload.len()];
        let short = &code[..code.len().saturating_sub(cut)];
        prop_assert!(decode(Element::Bf16, short, &mut back).is_err());
        let long = [&code[..], &vec![0; cut]].concat();
        prop_assert!(decode(Element::Bf16, &long, &mut back).is_err());
    }
}

#[test]
fn every_element_comes_back_as_an_escape_and_in_the_window() {
    // Each value once among many that share one exponent; the exponent goes through all.
    for element in Element::ALL {
        let wide = matches!(element, Element::Bf16 | Element::Fp16);
        for usual in (0..=u8::MAX).step_by(5) {
            let payload: Vec<u8> = (0..=u16::MAX)
                .flat_map(|bits| {
                    let other = [bits as u8, usual];
                    let rare = if bits % 29 == 0 {
                        bits.to_le_bytes()
                    } else {
                        other
                    };
                    if wide {
                        rare
                    } else {
                        [usual, rare[usize::from(bits % 29 == 0)]]
                    }
                })
                .collect();
            coded(element, &payload);
        }
    }
}

#[test]
fn every_value_of_16_bits_comes_back() {
    let all: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
    // All exponents are equally frequent in it, so most of its chunks have one or two.
    for element in Element::ALL {
        coded(element, &all);
    }
}

#[test]
fn normal_values_shrink_and_random_bits_do_not() {
    let payload = gaussian(100_000);
    let code = coded(Element::Bf16, &payload).unwrap();
    let ratio = payload.len() as f64 / code.len() as f64;
    assert!(ratio > 1.32, "{ratio}");
    let mut random = Normal(7);
    let noise: Vec<u8> = (0..100_000)
        .map(|_| (random.uniform() * 256.0) as u8)
        .collect();
    for element in [
        Element::Bf16,
        Element::Fp16,
        Element::Fp8E4M3,
        Element::Fp8E5M2,
    ] {
        assert_eq!(coded(element, &noise), None, "{element:?}");
    }
}

#[test]
fn zeros_and_short_payloads_are_taken() {
    for element in Element::ALL {
        assert!(coded(element, &[0; 10_000]).is_some());
        for length in [0, 1, 2, 3, 255] {
            assert_eq!(
                coded(element, &vec![0; length]),
                None,
                "{element:?} {length}"
            );
        }
    }
}

#[test]
fn without_room_nothing_is_encoded() {
    let payload = gaussian(5000);
    let bytes = coded(Element::Bf16, &payload).unwrap().len();
    assert_eq!(
        encode(Element::Bf16, &payload, &mut vec![0; bytes]),
        Some(bytes)
    );
    for room in [0, 3, 100, bytes - 1] {
        assert_eq!(encode(Element::Bf16, &payload, &mut vec![0; room]), None);
    }
}
