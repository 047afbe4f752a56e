//! What can be wrong with a layout, or with what is asked of it.

/// Kinds of refusal. None passes by itself: what was given has to change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LayoutErrorKind {
    /// There are no layers, no heads or no tensors, or a size is zero.
    Empty,
    /// Sizes do not fit the numbers that count them.
    TooLarge,
    /// Layers, heads, blocks or bytes lie outside what should hold them, or are named absent twice.
    Outside,
    /// Layers, shares or storages have something in common that they must not have.
    Overlap,
    /// Layers or heads and their places do not match in number, or no rank holds them.
    Missing,
    /// Layers differ that must be alike.
    Differ,
    /// Strides do not go forward, or axes do not nest.
    Strides,
    /// An address or a border is no multiple of a size.
    Misaligned,
}

/// Why there is no such layout, or why it does not have what was asked for: what is wrong, and with
/// which layers, sizes or addresses.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct LayoutError {
    kind: LayoutErrorKind,
    message: String,
}

impl LayoutError {
    /// An error of this kind with a message for people.
    pub(crate) fn new(kind: LayoutErrorKind, message: impl Into<String>) -> Self {
        Self {
            kind,
            message: message.into(),
        }
    }

    /// What kind of refusal this is.
    pub fn kind(&self) -> LayoutErrorKind {
        self.kind
    }
}

pub(crate) type Result<T> = std::result::Result<T, LayoutError>;
