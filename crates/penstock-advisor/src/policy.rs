//! What an operator or a request says about loading.

/// Whether to load what can be loaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LoadPolicy {
    /// Loads where that is expected to be faster than recomputing.
    #[default]
    Auto,
    /// Always loads.
    Always,
    /// Never loads.
    Never,
}

impl LoadPolicy {
    /// All policies.
    pub const ALL: [Self; 3] = [Self::Auto, Self::Always, Self::Never];

    /// The name of the policy.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Always => "always",
            Self::Never => "never",
        }
    }

    /// The policy of this name.
    ///
    /// ```
    /// use penstock_advisor::LoadPolicy;
    ///
    /// assert_eq!(LoadPolicy::named("never"), Some(LoadPolicy::Never));
    /// assert_eq!(LoadPolicy::named("sometimes"), None);
    /// ```
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|policy| policy.name() == name)
    }
}
