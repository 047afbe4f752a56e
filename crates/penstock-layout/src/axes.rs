//! Axes of a KV cache and the memory orders that vLLM names.

use std::fmt;
use std::str::FromStr;

/// An axis of a KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Axis {
    /// Attention layers.
    Layer,
    /// Blocks of consecutive tokens.
    Block,
    /// KV heads.
    Head,
    /// Tokens in a block.
    Token,
    /// Key and value of one token and head.
    Content,
}

impl Axis {
    /// The letter that stands for the axis in a layout's name.
    pub fn letter(self) -> char {
        match self {
            Axis::Layer => 'L',
            Axis::Block => 'B',
            Axis::Head => 'H',
            Axis::Token => 'N',
            Axis::Content => 'C',
        }
    }
}

impl fmt::Display for Axis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.letter())
    }
}

/// Order of heads and tokens inside a page, and in the canonical order of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Interior {
    /// All tokens of a head, then the next head.
    Hnc,
    /// All heads of a token, then the next token.
    Nhc,
}

impl fmt::Display for Interior {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Interior::Hnc => "HNC",
            Interior::Nhc => "NHC",
        })
    }
}

/// A memory order of the five axes, outermost first, by the name that vLLM gives it.
#[allow(missing_docs)] // The name is the definition.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvLayout {
    LBHNC,
    LBNHC,
    LHBNC,
    BLHNC,
    BLNHC,
    BHLNC,
}

/// Why a text does not name a layout.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no KV layout is named {0:?}; known are LBHNC, LBNHC, LHBNC, BLHNC, BLNHC, BHLNC")]
pub struct UnknownLayout(pub String);

impl KvLayout {
    /// Every layout.
    pub const ALL: [KvLayout; 6] = [
        KvLayout::LBHNC,
        KvLayout::LBNHC,
        KvLayout::LHBNC,
        KvLayout::BLHNC,
        KvLayout::BLNHC,
        KvLayout::BHLNC,
    ];

    /// The axes, outermost first.
    pub fn order(self) -> [Axis; 5] {
        use Axis::{Block as B, Content as C, Head as H, Layer as L, Token as N};
        match self {
            KvLayout::LBHNC => [L, B, H, N, C],
            KvLayout::LBNHC => [L, B, N, H, C],
            KvLayout::LHBNC => [L, H, B, N, C],
            KvLayout::BLHNC => [B, L, H, N, C],
            KvLayout::BLNHC => [B, L, N, H, C],
            KvLayout::BHLNC => [B, H, L, N, C],
        }
    }

    /// The name, as in `VLLM_KV_CACHE_LAYOUT`.
    pub fn name(self) -> &'static str {
        match self {
            KvLayout::LBHNC => "LBHNC",
            KvLayout::LBNHC => "LBNHC",
            KvLayout::LHBNC => "LHBNC",
            KvLayout::BLHNC => "BLHNC",
            KvLayout::BLNHC => "BLNHC",
            KvLayout::BHLNC => "BHLNC",
        }
    }

    /// Order of heads and tokens, whatever lies between them.
    pub fn interior(self) -> Interior {
        match self {
            KvLayout::LBNHC | KvLayout::BLNHC => Interior::Nhc,
            KvLayout::LBHNC | KvLayout::LHBNC | KvLayout::BLHNC | KvLayout::BHLNC => Interior::Hnc,
        }
    }
}

impl fmt::Display for KvLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for KvLayout {
    type Err = UnknownLayout;

    fn from_str(text: &str) -> Result<Self, UnknownLayout> {
        KvLayout::ALL
            .into_iter()
            .find(|layout| layout.name() == text)
            .ok_or_else(|| UnknownLayout(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_spell_the_order_and_parse_back() {
        for layout in KvLayout::ALL {
            let spelled: String = layout.order().iter().map(|axis| axis.letter()).collect();
            assert_eq!(layout.name(), spelled);
            assert_eq!(layout.name().parse(), Ok(layout));
            let interior: String = spelled.chars().filter(|c| "HNC".contains(*c)).collect();
            assert_eq!(layout.interior().to_string(), interior);
        }
        assert_eq!(
            "NHD".parse::<KvLayout>(),
            Err(UnknownLayout("NHD".to_owned()))
        );
    }
}
