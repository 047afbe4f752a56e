//! The contract of an eviction policy.

/// Chooses which entry a bounded holder gives up next.
///
/// A key is held at most once. Every method runs in constant time, amortised over the calls.
///
/// The owner has the bound. The end of a prompt goes before its start, since it is useless without
/// the start:
///
/// ```
/// use penstock_evict::{Lru, Policy};
///
/// let mut policy: Lru<&str> = Lru::new();
/// policy.use_chain(None, &[("start", 100), ("middle", 100), ("end", 100)]);
/// policy.insert("another", 50);
/// let mut victims = Vec::new();
/// while policy.weight() > 200 {
///     victims.extend(policy.evict());
/// }
/// assert_eq!(victims, [("end", 100), ("middle", 100)]);
/// assert!(policy.contains(&"start") && policy.contains(&"another"));
/// ```
pub trait Policy<K>: Send {
    /// Takes in an entry as the most recently used. If the key is already held, this is a touch
    /// that also changes its weight, and the previous weight is returned.
    fn insert(&mut self, key: K, weight: u64) -> Option<u64>;

    /// Notes a use of blocks that follow one another in a prompt, each with its weight. Blocks that
    /// are held are touched; the others are taken in. `parent` is the block before them, if any.
    ///
    /// The owner compares the weight with its bound afterwards. It moves bytes only for blocks that
    /// are still held then: a policy may give up first what it has just taken in.
    ///
    /// Blocks are useless without the blocks before them. So, unless a policy has a better rule for
    /// prefixes, the last block counts as used first: it is the oldest of them.
    fn use_chain(&mut self, parent: Option<&K>, chain: &[(K, u64)])
    where
        K: Clone,
    {
        let _ = parent;
        for (key, weight) in chain.iter().rev() {
            self.insert(key.clone(), *weight);
        }
    }

    /// Notes a use of the entry; returns whether it is held.
    fn touch(&mut self, key: &K) -> bool;

    /// Makes the entry the next to go: it counts as used before every other. Its next use undoes
    /// that. Returns whether it is held.
    fn demote(&mut self, key: &K) -> bool;

    /// Lets go of an entry that its owner gave up for its own reasons; returns the weight.
    fn remove(&mut self, key: &K) -> Option<u64>;

    /// Chooses a victim and lets go of it; none only if the policy is empty.
    fn evict(&mut self) -> Option<(K, u64)>;

    /// Whether the entry is held. Asking is not a use.
    fn contains(&self, key: &K) -> bool;

    /// Number of entries held.
    fn len(&self) -> usize;

    /// Sum of the weights of the entries held.
    fn weight(&self) -> u64;

    /// Whether no entry is held.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
