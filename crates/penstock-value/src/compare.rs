//! Two payloads that should be of the same KV: are they?
//!
//! An engine that computes a block twice does not always get the same bits. Other batches and other
//! chunks of a prompt add up in another order, and rounding differs. So payloads are compared as
//! numbers: by layers, and in windows of [`WINDOW`] elements.
//!
//! | what differs | finds |
//! |---|---|
//! | any bit, where engines round alike | everything |
//! | a layer, or many windows, by more than noise | other weights, layouts, rotary embeddings |
//! | the model's first layer, by more than rounding | the same, and adapters, far earlier |
//! | a layer, by much more than those before it | weights of one layer |
//! | the longest element of a layer, or what is a number at all | large exponents |
//! | few elements, but by much, and not in all layers from one on | a flipped bit, a damaged row, where all else is equal |
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

    /// The bounds of honest distances. Those of single precision are those of half precision: devices
    /// may multiply in fewer bits.
    fn bounds(self) -> Bounds {
        let [layer, first, floor] = match self {
            Self::Bf16 => [0.7, 0.015, 0.02],
            Self::Fp16 | Self::Fp32 => [0.15, 0.002, 0.004],
            Self::Fp8E4M3 => [1.2, 0.06, 0.06],
            Self::Fp8E5M2 => [1.2, 0.12, 0.12],
        };
        Bounds {
            layer,
            first,
            floor,
        }
    }

    /// The smallest number that has all bits of the mantissa. What is far below is rounded to zero.
    fn normal(self) -> f32 {
        let exponent = match self {
            Self::Bf16 | Self::Fp32 => -126,
            Self::Fp16 | Self::Fp8E5M2 => -14,
            Self::Fp8E4M3 => -6,
        };
        2_f32.powi(exponent)
    }

    /// The distance of 1 from the next number.
    fn ulp(self) -> f32 {
        let bits = match self {
            Self::Bf16 => 7,
            Self::Fp16 => 10,
            Self::Fp32 => 23,
            Self::Fp8E4M3 => 3,
            Self::Fp8E5M2 => 2,
        };
        2_f32.powi(-bits)
    }
}

/// Bounds that depend on the type of the numbers.
struct Bounds {
    /// The distance of any layer.
    layer: f32,
    /// The distance of the model's first layer: nothing before it has rounded.
    first: f32,
    /// The least distance of earlier layers that a [jump](JUMP) is measured by.
    floor: f32,
}

/// How many times farther a layer may be than all before it.
const JUMP: f32 = 8.0;
/// How many times longer the longest element of a layer may be than that of the other side.
const PEAK: f32 = 4.0;
/// A window at this distance has other content, and not the same with noise.
const FAR: f32 = 0.9;
/// The share of windows that may be so far: a token may have gone to other experts.
const FAR_SHARE: f32 = 0.07;
/// Noise that is in no more than this share of the elements is small in each of them, unless it goes
/// on through all later layers: one engine may have decoded a token that the other has prefilled.
const FEW: f32 = 0.01;
/// The most of such noise, in distances between neighbouring numbers.
const MOST_ULPS: f32 = 8.0;

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

/// How far apart two payloads are.
///
/// The distance of two windows is the root of the sum of their squared differences, over that of the
/// mean of both sums of squares. It is 0 for equal windows, the root of two for unrelated ones, and 2
/// for opposite ones. That of a layer is what a quarter of its windows exceed: a few odd tokens do
/// not count.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Distance {
    /// The distance of the model's first layer; 0 if it is not among them.
    pub first: f32,
    /// The largest of a layer.
    pub layer: f32,
    /// How many times farther a layer is than all before it, from the third on.
    pub jump: f32,
    /// How many times longer the longest element of a layer is on one side than on the other.
    pub peak: f32,
    /// The share of windows that are far from each other.
    pub far: f32,
    /// Whether one payload alone has no number somewhere, or nothing but zeros in a window,
    /// where the other is longer than what is rounded to zero.
    pub is_broken: bool,
    /// The share of elements that differ.
    pub differing: f32,
    /// If these are few, and not in all layers from one on: the most that one of them is off, in distances between neighbouring numbers.
    /// An element that is shorter than the root mean square counts as that long: short ones are sums
    /// of long ones, and have their noise.
    pub ulps: f32,
}

/// What two payloads are to each other.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Compared {
    /// All bits are equal.
    Same,
    /// Both differ as honest payloads of the same KV do.
    Alike(Distance),
    /// One of them is not of this KV.
    Apart(Distance),
    /// Both differ, and their numbers are not known, so nothing follows.
    Unknown,
}

/// Compares two payloads of one length. If it `is_exact`, payloads of the same KV have the same bits.
pub fn compare(content: Content, ours: &[u8], theirs: &[u8], is_exact: bool) -> Compared {
    debug_assert_eq!(ours.len(), theirs.len(), "one geometry has one length");
    if ours == theirs {
        return Compared::Same;
    }
    let Some(numbers) = content.numbers else {
        return Compared::Unknown;
    };
    let bf16 = |[a, b]: [u8; 2]| bf16(u16::from_le_bytes([a, b]));
    let half = |[a, b]: [u8; 2]| fp16(u16::from_le_bytes([a, b]));
    // The same as the upper byte of a half.
    let quarter = |[byte]: [u8; 1]| fp16(u16::from(byte) << 8);
    let distance = match numbers {
        Numbers::Bf16 => distance(content, numbers, ours, theirs, bf16),
        Numbers::Fp16 => distance(content, numbers, ours, theirs, half),
        Numbers::Fp32 => distance(content, numbers, ours, theirs, f32::from_le_bytes),
        Numbers::Fp8E4M3 => distance(content, numbers, ours, theirs, |[byte]| e4m3(byte)),
        Numbers::Fp8E5M2 => distance(content, numbers, ours, theirs, quarter),
    };
    match is_exact || distance.is_of_other_kv(&numbers.bounds()) {
        true => Compared::Apart(distance),
        false => Compared::Alike(distance),
    }
}

impl Distance {
    fn is_of_other_kv(&self, bounds: &Bounds) -> bool {
        self.is_broken
            || self.peak > PEAK
            || self.layer > bounds.layer
            || self.first > bounds.first
            || self.far > FAR_SHARE
            || self.jump > JUMP
            || self.ulps > MOST_ULPS
    }
}

fn distance<const N: usize>(
    content: Content,
    numbers: Numbers,
    ours: &[u8],
    theirs: &[u8],
    number: impl Fn([u8; N]) -> f32 + Copy,
) -> Distance {
    let floor = numbers.bounds().floor;
    let pieces = (content.pages * content.layers).max(1);
    // Layers of other lengths are not known of; then all count as one.
    let is_cut = ours.len().is_multiple_of(pieces * N);
    let layer_bytes = if is_cut {
        ours.len() / pieces
    } else {
        ours.len()
    };
    let mut found = Distance::default();
    let mut all = Sums::default();
    let (mut windows, mut far, mut differing) = (0, 0, 0);
    let mut distances = Vec::with_capacity(layer_bytes.div_ceil(N * WINDOW));
    let mut farthest = 0.0_f32;
    // Whether the layer before differs, whether two in a row do, and whether one does not after one
    // that does.
    let (mut was_other, mut goes_on, mut ends) = (false, false, false);
    let pairs = ours.chunks(layer_bytes).zip(theirs.chunks(layer_bytes));
    for (place, (ours, theirs)) in pairs.enumerate() {
        let layer = place % content.layers.max(1);
        if layer == 0 {
            farthest = 0.0;
            was_other = false;
        }
        let is_other = ours != theirs;
        goes_on |= was_other && is_other;
        ends |= was_other && !is_other;
        was_other = is_other;
        distances.clear();
        let mut longest = [0.0_f32; 2];
        for (a, b) in in_windows::<N>(ours, theirs) {
            let window = Sums::of(a, b, number);
            found.is_broken |= window.is_broken || window.is_zero_on_one_side(numbers.normal());
            longest = [0, 1].map(|side| longest[side].max(window.longest[side]));
            differing += a.iter().zip(b).filter(|(a, b)| a != b).count();
            distances.push(window.distance());
            far += usize::from(window.distance() > FAR);
            all.add(&window);
        }
        windows += distances.len();
        let distance = upper_quarter(&mut distances);
        found.layer = found.layer.max(distance);
        if layer == 0 && content.is_first && is_cut {
            found.first = found.first.max(distance);
        }
        if layer >= 2 {
            found.jump = found.jump.max(distance / farthest.max(floor));
        }
        farthest = farthest.max(distance);
        let [shorter, longer] = [longest[0].min(longest[1]), longest[0].max(longest[1])];
        if longer > shorter {
            found.peak = found.peak.max(longer / shorter);
        }
    }
    found.far = far as f32 / windows.max(1) as f32;
    found.differing = differing as f32 / (ours.len() / N).max(1) as f32;
    if found.differing <= FEW && (ends || !goes_on) {
        let typical = all.typical();
        let pairs = in_windows::<N>(ours, theirs).filter(|(a, b)| a != b);
        for (a, b) in pairs.flat_map(|(a, b)| numbers_of(a, b, number)) {
            // The next power of two below: there, numbers are so far from each other.
            let size = a.abs().max(b.abs()).max(typical);
            let power = f32::from_bits(size.to_bits() & 0x7f80_0000);
            found.ulps = found.ulps.max((a - b).abs() / (power * numbers.ulp()));
        }
    }
    found
}

/// The elements of both payloads, in windows.
fn in_windows<'a, const N: usize>(
    ours: &'a [u8],
    theirs: &'a [u8],
) -> impl Iterator<Item = (&'a [[u8; N]], &'a [[u8; N]])> {
    let ours = ours.as_chunks::<N>().0.chunks(WINDOW);
    ours.zip(theirs.as_chunks::<N>().0.chunks(WINDOW))
}

fn numbers_of<'a, const N: usize>(
    ours: &'a [[u8; N]],
    theirs: &'a [[u8; N]],
    number: impl Fn([u8; N]) -> f32 + Copy + 'a,
) -> impl Iterator<Item = (f32, f32)> + Clone + 'a {
    let pairs = ours.iter().zip(theirs);
    pairs.map(move |(&a, &b)| (number(a), number(b)))
}

/// What a quarter of the distances exceed.
fn upper_quarter(distances: &mut [f32]) -> f32 {
    if distances.is_empty() {
        return 0.0;
    }
    let place = (distances.len() - 1) * 3 / 4;
    *distances.select_nth_unstable_by(place, f32::total_cmp).1
}

/// Elements that are taken in at a time: sums of their own, so that vector instructions add them.
const LANES: usize = 16;

/// Sums over one of so many elements.
#[derive(Default)]
struct Lanes {
    squares: [[f32; LANES]; 2],
    differences: [f32; LANES],
    longest: [[f32; LANES]; 2],
}

impl Lanes {
    #[inline(always)]
    fn take(&mut self, pair: impl Fn(usize) -> (f32, f32)) {
        // Not `f32::max`, which asks for more than one instruction.
        let longer = |most: f32, one: f32| if one > most { one } else { most };
        for lane in 0..LANES {
            let (a, b) = pair(lane);
            self.squares[0][lane] += a * a;
            self.squares[1][lane] += b * b;
            self.differences[lane] += (a - b) * (a - b);
            self.longest[0][lane] = longer(self.longest[0][lane], a.abs());
            self.longest[1][lane] = longer(self.longest[1][lane], b.abs());
        }
    }
}

/// Sums over elements of both payloads that are numbers.
#[derive(Clone, Copy, Default)]
struct Sums {
    elements: u32,
    /// The squares of each side.
    squares: [f64; 2],
    /// The squares of what they differ by.
    differences: f64,
    /// The longest element of each side.
    longest: [f32; 2],
    /// Whether one side alone has no number somewhere.
    is_broken: bool,
}

impl Sums {
    fn of<const N: usize>(
        ours: &[[u8; N]],
        theirs: &[[u8; N]],
        number: impl Fn([u8; N]) -> f32 + Copy,
    ) -> Self {
        let mut lanes = Lanes::default();
        let ((ours_by_lane, ours_left), (theirs_by_lane, theirs_left)) =
            (ours.as_chunks::<LANES>(), theirs.as_chunks::<LANES>());
        for (a, b) in ours_by_lane.iter().zip(theirs_by_lane) {
            lanes.take(|lane| (number(a[lane]), number(b[lane])));
        }
        lanes.take(|lane| {
            let [a, b] = [ours_left, theirs_left].map(|left| left.get(lane));
            (a.map_or(0.0, |&a| number(a)), b.map_or(0.0, |&b| number(b)))
        });
        let sum = |of: [f32; LANES]| f64::from(of.iter().sum::<f32>());
        let longest = |of: [f32; LANES]| of.into_iter().fold(0.0, f32::max);
        let squares = lanes.squares.map(sum);
        if !(squares[0] + squares[1]).is_finite() {
            return Self::of_any(numbers_of(ours, theirs, number));
        }
        Self {
            elements: ours.len() as u32,
            squares,
            differences: sum(lanes.differences),
            longest: lanes.longest.map(longest),
            is_broken: false,
        }
    }

    /// Sums where some elements are no numbers, or have squares that are too large.
    fn of_any(pairs: impl Iterator<Item = (f32, f32)>) -> Self {
        let mut sums = Self::default();
        for (a, b) in pairs {
            sums.is_broken |= a.is_finite() != b.is_finite();
            if a.is_finite() && b.is_finite() {
                sums.elements += 1;
                sums.longest = [sums.longest[0].max(a.abs()), sums.longest[1].max(b.abs())];
                let (a, b) = (f64::from(a), f64::from(b));
                sums.squares = [sums.squares[0] + a * a, sums.squares[1] + b * b];
                sums.differences += (a - b) * (a - b);
            }
        }
        sums
    }

    fn add(&mut self, other: &Self) {
        self.elements += other.elements;
        self.squares = [0, 1].map(|side| self.squares[side] + other.squares[side]);
        self.differences += other.differences;
    }

    /// Whether one side alone is zero, and the other is too long to be rounded to that.
    fn is_zero_on_one_side(&self, normal: f32) -> bool {
        let is_zero = |side: usize| self.squares[side] == 0.0;
        is_zero(0) != is_zero(1) && self.longest[0].max(self.longest[1]) >= normal
    }

    fn distance(&self) -> f32 {
        match self.differences > 0.0 {
            true => (2.0 * self.differences / (self.squares[0] + self.squares[1])).sqrt() as f32,
            false => 0.0,
        }
    }

    /// The root mean square of the elements of both sides.
    fn typical(&self) -> f32 {
        let squares = self.squares[0] + self.squares[1];
        (squares / f64::from(2 * self.elements).max(1.0)).sqrt() as f32
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
