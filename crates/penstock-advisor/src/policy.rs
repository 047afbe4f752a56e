//! What an operator or a request says about loading.

/// Whether to load what can be loaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LoadPolicy {
    /// Where it is expected to be faster than recomputing.
    #[default]
    Auto,
    /// Always.
    Always,
    /// Never.
    Never,
}

impl LoadPolicy {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Auto, Self::Always, Self::Never];

    /// What it is called.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Always => "always",
            Self::Never => "never",
        }
    }

    /// The one of this name.
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
