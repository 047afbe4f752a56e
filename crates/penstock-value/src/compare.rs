//! Two payloads that should be of the same KV: are they?
//!
//! An engine that computes a block twice does not always get the same bits. Other batches and other
//! chunks of a prompt add up in another order, and rounding differs. So payloads are compared as
//! numbers: by layers, and in windows of [`WINDOW`] elements.
//!
//! | what | what it finds |
//! |---|---|
//! | bits that differ, where they must not | everything |
//! | the model's first layer is off by more than rounding | other weights, adapters, rotary embeddings, layouts |
//! | a layer is far away | weights of one layer, an order of layers or heads |
//! | a window is far away, or has no numbers | damaged rows, large exponents |
//! | an element is off by much more than the others of its layer | a flipped bit, where the others are quiet |
//!
//! The bounds are measured: `benches/witness_noise.py` has the distances of honest KV and of KV that
//! is wrong in many ways. What is wrong by less than honest noise is not found.

use crate::compress::Element;

/// Elements of a window. The last window of a payload may have fewer.
pub const WINDOW: usize = 256;

/// The type of a payload's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Numbers {
    /// bfloat16.
    Bf16,
    /// IEEE 754 half precision.
    Fp16,
    /// IEEE 754 single precision.
    Fp32,
    /// 8 bits, 4 of exponent and 3 of mantissa, no infinities.
    Fp8E4M3,
    /// 8 bits, 5 of exponent and 2 of mantissa.
    Fp8E5M2,
}

impl From<Element> for Numbers {
    fn from(element: Element) -> Self {
        match element {
            Element::Bf16 => Self::Bf16,
            Element::Fp16 => Self::Fp16,
            Element::Fp8E4M3 => Self::Fp8E4M3,
            Element::Fp8E5M2 => Self::Fp8E5M2,
        }
    }
}

impl Numbers {
    /// Every type.
    pub const ALL: [Self; 5] = [
        Self::Bf16,
        Self::Fp16,
        Self::Fp32,
        Self::Fp8E4M3,
        Self::Fp8E5M2,
    ];

    /// The type of this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|numbers| numbers.name() == name)
    }

    /// Stable lower-case name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::Fp16 => "fp16",
            Self::Fp32 => "fp32",
            Self::Fp8E4M3 => "fp8_e4m3",
            Self::Fp8E5M2 => "fp8_e5m2",
        }
    }

    /// Bytes of an element.
    pub fn bytes(self) -> usize {
        match self {
            Self::Fp8E4M3 | Self::Fp8E5M2 => 1,
            Self::Bf16 | Self::Fp16 => 2,
            Self::Fp32 => 4,
        }
    }

    /// The bounds of honest distances.
    fn bounds(self) -> Bounds {
        match self {
            Self::Bf16 | Self::Fp16 => Bounds {
                first: 0.011,
                layer: 0.5,
                window: 0.87,
                rounding: 1.0 / 256.0,
            },
            Self::Fp32 => Bounds {
                first: 0.001,
                layer: 0.1,
                window: 0.5,
                rounding: 1.0 / 4096.0,
            },
            Self::Fp8E4M3 | Self::Fp8E5M2 => Bounds {
                first: 0.06,
                layer: 0.5,
                window: 0.87,
                rounding: 1.0 / 8.0,
            },
        }
    }
}

/// How far apart payloads of the same KV may be.
struct Bounds {
    /// The distance of the model's first layer. No other layer's noise adds to it.
    first: f32,
    /// The distance of any layer.
    layer: f32,
    /// The distance of any window.
    window: f32,
    /// What rounding does to a number, as a share of it.
    rounding: f32,
}

/// How often an element may be off by more than what the other elements of its layer are off by.
const OUTLIER: f32 = 31.0;

/// What a payload consists of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Content {
    /// The type of its numbers; None if it is not known, or if there are several.
    pub numbers: Option<Numbers>,
    /// The number of its pages, which follow one another.
    pub pages: usize,
    /// The number of layers in a page. They follow one another, and have as many bytes each.
    pub layers: usize,
    /// Whether the first of them is the first of the model, and reads embeddings of tokens alone: no
    /// hidden states, and nothing that was made of images.
    pub is_first: bool,
}

/// How far apart two payloads are. Distances are those of vectors: the root of the sum of the squared
/// differences, over that of the mean of both sums of squares. 0 is for equal vectors, the root of two
/// for unrelated ones, and 2 for opposite ones.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Distance {
    /// That of the model's first layer; 0 if it is not among them.
    pub first: f32,
    /// The largest of a layer.
    pub layer: f32,
    /// The largest of a window. Infinite if one payload alone has a number somewhere.
    pub window: f32,
    /// The most that an element is off, as a multiple of what the others of its layer are.
    pub outlier: f32,
}

/// What two payloads are to each other.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Compared {
    /// All bits are equal.
    Same,
    /// They differ as honest payloads of the same KV do.
    Alike(Distance),
    /// One of them is not of this KV.
    Apart(Distance),
    /// They differ, and their numbers are not known, so nothing follows.
    Unknown,
}

/// Compares two payloads of one length. If it `is_exact`, payloads of the same KV have the same bits.
pub fn compare(content: Content, ours: &[u8], theirs: &[u8], is_exact: bool) -> Compared {
    debug_assert_eq!(ours.len(), theirs.len(), "one geometry has one length");
    if ours == theirs {
        return Compared::Same;
    }
    let Some(numbers) = content.numbers else {
        return match is_exact {
            true => Compared::Apart(Distance::default()),
            false => Compared::Unknown,
        };
    };
    let bf16 = |[a, b]: [u8; 2]| bf16(u16::from_le_bytes([a, b]));
    let fp16_of = |[a, b]: [u8; 2]| fp16(u16::from_le_bytes([a, b]));
    let bounds = &numbers.bounds();
    let distance = match numbers {
        Numbers::Bf16 => distance(content, bounds, ours, theirs, bf16),
        Numbers::Fp16 => distance(content, bounds, ours, theirs, fp16_of),
        Numbers::Fp32 => distance(content, bounds, ours, theirs, f32::from_le_bytes),
        Numbers::Fp8E4M3 => distance(content, bounds, ours, theirs, |[byte]| e4m3(byte)),
        // The same as the upper byte of fp16.
        Numbers::Fp8E5M2 => {
            let e5m2 = |[byte]: [u8; 1]| fp16(u16::from(byte) << 8);
            distance(content, bounds, ours, theirs, e5m2)
        }
    };
    let is_apart = is_exact
        || distance.first > bounds.first
        || distance.layer > bounds.layer
        || distance.window > bounds.window
        || distance.outlier > OUTLIER;
    match is_apart {
        true => Compared::Apart(distance),
        false => Compared::Alike(distance),
    }
}

fn distance<const N: usize>(
    content: Content,
    bounds: &Bounds,
    ours: &[u8],
    theirs: &[u8],
    number: impl Fn([u8; N]) -> f32 + Copy,
) -> Distance {
    let pieces = (content.pages * content.layers).max(1);
    // Layers of other lengths are not known of; then all count as one.
    let is_cut = ours.len().is_multiple_of(pieces * N);
    let layer_bytes = if is_cut {
        ours.len() / pieces
    } else {
        ours.len()
    };
    let mut found = Distance::default();
    let pairs = ours.chunks(layer_bytes).zip(theirs.chunks(layer_bytes));
    for (place, (ours, theirs)) in pairs.enumerate() {
        if ours == theirs {
            continue;
        }
        let layer = Layer::of(ours, theirs, number);
        let distance = layer.all.distance();
        if content.is_first && is_cut && place % content.layers == 0 {
            found.first = found.first.max(distance);
        }
        found.layer = found.layer.max(distance);
        found.window = found.window.max(layer.window);
        found.outlier = found.outlier.max(layer.outlier(bounds.rounding));
    }
    found
}

/// What the windows of a layer add up to.
#[derive(Default)]
struct Layer {
    all: Sums,
    /// The largest distance of a window.
    window: f32,
    /// The most that an element is off, as a share of it, or of the root mean square of its window if
    /// that is more. And the square of how far it is off.
    most: (f32, f64),
}

impl Layer {
    fn of<const N: usize>(
        ours: &[u8],
        theirs: &[u8],
        number: impl Fn([u8; N]) -> f32 + Copy,
    ) -> Self {
        let mut layer = Self::default();
        let ours = ours.as_chunks::<N>().0.chunks(WINDOW);
        let theirs = theirs.as_chunks::<N>().0.chunks(WINDOW);
        for (ours, theirs) in ours.zip(theirs) {
            let pairs = || (ours.iter().zip(theirs)).map(|(&a, &b)| (number(a), number(b)));
            let window = Sums::of(pairs());
            layer.all.add(&window);
            if window.differences == 0.0 && !window.is_broken {
                continue;
            }
            layer.window = layer.window.max(window.distance());
            let typical = window.typical();
            for (a, b) in pairs() {
                let off = (a - b).abs();
                let share = off / a.abs().max(b.abs()).max(typical);
                if share > layer.most.0 {
                    layer.most = (share, f64::from(off) * f64::from(off));
                }
            }
        }
        layer
    }

    fn outlier(&self, rounding: f32) -> f32 {
        let (share, square) = self.most;
        let others = Sums {
            differences: (self.all.differences - square).max(0.0),
            ..self.all
        };
        share / others.distance().max(rounding)
    }
}

/// Sums over elements of both payloads that are numbers.
#[derive(Clone, Copy, Default)]
struct Sums {
    elements: u32,
    /// Squares of both.
    squares: f64,
    /// Squares of what they differ by.
    differences: f64,
    /// Whether one of them alone has no number somewhere.
    is_broken: bool,
}

impl Sums {
    fn of(pairs: impl Iterator<Item = (f32, f32)> + Clone) -> Self {
        let (mut squares, mut differences) = (0.0_f32, 0.0_f32);
        let mut elements = 0;
        for (a, b) in pairs.clone() {
            elements += 1;
            squares += a * a + b * b;
            differences += (a - b) * (a - b);
        }
        if !squares.is_finite() {
            return Self::of_any(pairs);
        }
        Self {
            elements,
            squares: f64::from(squares),
            differences: f64::from(differences),
            is_broken: false,
        }
    }

    /// The same where some are no numbers, or have squares that are too large.
    fn of_any(pairs: impl Iterator<Item = (f32, f32)>) -> Self {
        let mut sums = Self::default();
        for (a, b) in pairs {
            sums.is_broken |= a.is_finite() != b.is_finite();
            if a.is_finite() && b.is_finite() {
                let (a, b) = (f64::from(a), f64::from(b));
                sums.elements += 1;
                sums.squares += a * a + b * b;
                sums.differences += (a - b) * (a - b);
            }
        }
        sums
    }

    fn add(&mut self, other: &Self) {
        self.elements += other.elements;
        self.squares += other.squares;
        self.differences += other.differences;
        self.is_broken |= other.is_broken;
    }

    fn distance(&self) -> f32 {
        if self.is_broken {
            return f32::INFINITY;
        }
        match self.differences > 0.0 {
            true => (2.0 * self.differences / self.squares).sqrt() as f32,
            false => 0.0,
        }
    }

    /// The root mean square of the elements.
    fn typical(&self) -> f32 {
        (self.squares / f64::from(2 * self.elements)).sqrt() as f32
    }
}

fn bf16(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

fn fp16(bits: u16) -> f32 {
    const INFINITE: u16 = 0x7c00;
    if bits & INFINITE == INFINITE {
        return f32::NAN;
    }
    // Exponent and mantissa where a single has them; then the difference of the exponents' biases.
    let magnitude = f32::from_bits(u32::from(bits & 0x7fff) << 13) * f32::from_bits(0x7780_0000);
    if bits & 0x8000 == 0 {
        magnitude
    } else {
        -magnitude
    }
}

fn e4m3(bits: u8) -> f32 {
    if bits & 0x7f == 0x7f {
        return f32::NAN;
    }
    let magnitude = f32::from_bits(u32::from(bits & 0x7f) << 20) * f32::from_bits(0x7b80_0000);
    if bits & 0x80 == 0 {
        magnitude
    } else {
        -magnitude
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_what_their_bits_say() {
        for (bits, number) in [(0x3f80, 1.0), (0xc040, -3.0), (0x0000, 0.0)] {
            assert_eq!(bf16(bits), number);
        }
        for (bits, number) in [
            (0x3c00, 1.0),
            (0xc200, -3.0),
            (0x0001, 2_f32.powi(-24)),
            (0x7bff, 65504.0),
        ] {
            assert_eq!(fp16(bits), number);
        }
        for (bits, number) in [
            (0x38, 1.0),
            (0xc4, -3.0),
            (0x01, 2_f32.powi(-9)),
            (0x7e, 448.0),
        ] {
            assert_eq!(e4m3(bits), number);
        }
        assert!(fp16(0x7c01).is_nan() && e4m3(0xff).is_nan() && bf16(0x7fc0).is_nan());
    }
}
