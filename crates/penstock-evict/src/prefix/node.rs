//! What is known about a block.

/// The block before another one: where it is, and a serial that shows that it is still that block.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Above {
    pub(super) node: u32,
    pub(super) serial: u64,
}

pub(super) struct Node<K> {
    pub(super) key: K,
    pub(super) weight: u64,
    /// Tells the block from earlier users of the same place.
    pub(super) serial: u64,
    pub(super) parent: Option<Above>,
    /// How many blocks are before this one in its prompt. A parent's depth is lower, so there are
    /// no cycles.
    pub(super) depth: u32,
    /// Different blocks that are known to follow this one: all, those held, and those in the cache
    /// that goes by worth.
    pub(super) children: u32,
    pub(super) held_children: u32,
    pub(super) worthy_children: u32,
    /// Uses of this block, and of the conversation that it continued.
    pub(super) uses: u32,
    /// The block's age bucket when it was used last. A new block that continues a conversation
    /// takes over the value of the block before it.
    pub(super) wait: Option<u8>,
    /// The chain that used the block last.
    pub(super) chain: u64,
    /// Whether the block is in the cache; in one that always goes by worth; in one that is always
    /// least recently used.
    pub(super) held: bool,
    pub(super) worthy: bool,
    pub(super) recent: bool,
    /// The block is in neither of these two any more, and goes before every other.
    pub(super) demoted: bool,
    /// The block was to be forgotten, but is still held by a cache.
    pub(super) overdue: bool,
    /// The block's place among the candidates, if it is worthy and no block after it is worthy.
    pub(super) candidate: Option<u32>,
    /// The block's place among the strays, if it is one.
    pub(super) stray: Option<u32>,
}
