//! The contract of an eviction policy.

/// Chooses which entry a bounded holder gives up next.
///
/// A key is held at most once. Every method runs in constant time, amortised over the calls.
///
/// The owner has the bound. Of a prompt the end goes first, since it is of no use without the rest:
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
    /// Takes in an entry, most recently used. If the key is already held, this is a touch that
    /// also changes its weight; the previous weight is returned.
    fn insert(&mut self, key: K, weight: u64) -> Option<u64>;

    /// Notes a use of blocks that follow one another in a prompt, each with its weight: those that
    /// are held are touched, the others taken in. `parent` is the block before them, if any.
    ///
    /// The owner compares the weight with its bound afterwards, and moves bytes only for what is
    /// still held then: a policy may give up first what it has just taken in.
    ///
    /// Unless a policy knows better what to make of a prefix, the last is used first, so that it
    /// is the oldest of them: without the blocks before it, it is of no use.
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

    /// Lets go of an entry that its owner gave up for reasons of its own; returns its weight.
    fn remove(&mut self, key: &K) -> Option<u64>;

    /// Chooses a victim and lets go of it; none only if the policy is empty.
    fn evict(&mut self) -> Option<(K, u64)>;

    /// Whether the entry is held. Not a use.
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
