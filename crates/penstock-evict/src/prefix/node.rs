//! What is known of a block.

/// A block before another: where it is, and that it is still that block.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Above {
    pub(super) node: u32,
    pub(super) serial: u64,
}

pub(super) struct Node<K> {
    pub(super) key: K,
    pub(super) weight: u64,
    /// Told apart from earlier users of the same place.
    pub(super) serial: u64,
    pub(super) parent: Option<Above>,
    /// Blocks before this one in its prompt; a parent's is lower, so there are no cycles.
    pub(super) depth: u32,
    /// Different blocks known to follow this one; those held; those that going by worth holds.
    pub(super) children: u32,
    pub(super) held_children: u32,
    pub(super) worthy_children: u32,
    /// Uses, and those of the conversation that this block continued.
    pub(super) uses: u32,
    /// How old it was, in buckets, when it was used last; of a new block, the one before it.
    pub(super) wait: Option<u8>,
    /// The chain that used it last.
    pub(super) chain: u64,
    /// In the cache; in one that always goes by worth; in one that is always least recently used.
    pub(super) held: bool,
    pub(super) worthy: bool,
    pub(super) recent: bool,
    /// It was to be forgotten, but is held.
    pub(super) overdue: bool,
    /// Its place among the candidates, if it is worthy and no block after it is.
    pub(super) candidate: Option<u32>,
    /// Its place among the strays.
    pub(super) stray: Option<u32>,
}
