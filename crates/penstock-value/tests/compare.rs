//! Comparisons: what honest engines may differ by, and what they may not.

use penstock_value::compare::{Compared, Content, Numbers, WINDOW, compare};

const LAYERS: usize = 4;

fn content(numbers: Numbers) -> Content {
    Content {
        numbers: Some(numbers),
        pages: 1,
        layers: LAYERS,
        routes: false,
        is_first: false,
    }
}

/// A payload of E4M3 numbers of about one.
fn e4m3(windows: usize) -> Vec<u8> {
    (0..windows * WINDOW)
        .map(|n| 0x30 + (n % 16) as u8)
        .collect()
}

fn is_apart(numbers: Numbers, ours: &[u8], theirs: &[u8]) -> bool {
    matches!(
        compare(content(numbers), ours, theirs, false),
        Compared::Apart(_)
    )
}

#[test]
fn a_window_that_is_rounded_to_zero_on_one_side_is_honest() {
    let mut ours = e4m3(40);
    ours[..WINDOW].fill(0);
    let mut theirs = ours.clone();
    // The smallest number: what is hardly shorter becomes zero.
    theirs[9] = 0x01;
    assert!(!is_apart(Numbers::Fp8E4M3, &ours, &theirs));
    // Such a long one does not.
    theirs[9] = 0x30;
    assert!(is_apart(Numbers::Fp8E4M3, &ours, &theirs));
}

#[test]
fn a_number_is_not_infinite_on_one_side() {
    for (numbers, infinite) in [(Numbers::Bf16, 0x7f80_u16), (Numbers::Fp16, 0x7c00)] {
        let ours: Vec<u8> = [0x00, 0x3c].repeat(40 * WINDOW);
        let mut theirs = ours.clone();
        theirs[100..102].copy_from_slice(&infinite.to_le_bytes());
        assert!(is_apart(numbers, &ours, &theirs));
        assert_eq!(
            compare(content(numbers), &theirs, &theirs, false),
            Compared::Same
        );
    }
}

#[test]
fn payloads_of_any_length_are_compared() {
    for bytes in [1, 2, 3, 511, 512, 513, 4099] {
        let ours: Vec<u8> = (0..bytes).map(|n| 0x38 + (n % 3) as u8).collect();
        let mut theirs = ours.clone();
        theirs[0] ^= 1;
        for numbers in Numbers::ALL {
            compare(content(numbers), &ours, &theirs, false);
        }
    }
}

#[test]
fn a_token_that_was_decoded_may_have_the_noise_of_other_kernels() {
    // A block of 128 tokens, of which one engine has prefilled all, and another has decoded the last.
    const TOKENS: usize = 128;
    let of_layer = TOKENS * WINDOW;
    let ours: Vec<u8> = (0..LAYERS * of_layer)
        .flat_map(|n| {
            let sign = if n % 3 == 0 { -1.0 } else { 1.0 };
            bf16(sign * (0.5 + (n * 37 % 64) as f32 / 64.0))
        })
        .collect();
    let off = |n: usize| {
        let number = f32::from_bits(u32::from_le_bytes([0, 0, ours[2 * n], ours[2 * n + 1]]));
        bf16(number * if n.is_multiple_of(2) { 1.1 } else { 0.9 })
    };
    let is_apart_in = |layers: std::ops::Range<usize>| {
        let mut theirs = ours.clone();
        for end in layers.map(|layer| (layer + 1) * of_layer) {
            for n in end - WINDOW..end {
                theirs[2 * n..2 * n + 2].copy_from_slice(&off(n));
            }
        }
        is_apart(Numbers::Bf16, &ours, &theirs)
    };
    assert!(!is_apart_in(1..LAYERS));
    // Noise does not end, so this is damage.
    assert!(is_apart_in(1..LAYERS - 1));
    assert!(is_apart_in(1..2));
}

fn bf16(number: f32) -> [u8; 2] {
    ((number.to_bits() >> 16) as u16).to_le_bytes()
}

#[test]
fn where_tokens_are_routed_only_unrelated_layers_are_wrong_beyond_the_first() {
    // Every second element of the second layer is so many times longer, the others as much shorter.
    let at = |off_by: f32| {
        let ours: Vec<f32> = (0..2 * 4096).map(|n| (n as f32).sin() + 1.5).collect();
        let off = |n: usize| off_by * ours[n] * if n.is_multiple_of(2) { 1.0 } else { -1.0 };
        let theirs: Vec<f32> = (0..ours.len())
            .map(|n| if n < 4096 { ours[n] } else { ours[n] + off(n) })
            .collect();
        let bytes = |numbers: &[f32]| -> Vec<u8> {
            let bits = numbers.iter().map(|number| (number.to_bits() >> 16) as u16);
            bits.flat_map(u16::to_le_bytes).collect()
        };
        (bytes(&ours), bytes(&theirs))
    };
    let is_apart = |off_by: f32, routes: bool| {
        let (ours, theirs) = at(off_by);
        let content = Content {
            numbers: Some(Numbers::Bf16),
            pages: 1,
            layers: 2,
            is_first: true,
            routes,
        };
        matches!(compare(content, &ours, &theirs, false), Compared::Apart(_))
    };
    // At a distance of 0.82, and of 1.25.
    assert!(is_apart(1.0, false) && !is_apart(1.0, true));
    assert!(is_apart(2.8, false) && is_apart(2.8, true));
}
