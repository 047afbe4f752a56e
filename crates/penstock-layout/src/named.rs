//! Enums whose entries have names, from one list.

/// Makes an enum whose entries have stable names, with `ALL` entries, their `name`, and the entry
/// that is `named` so.
///
/// ```
/// penstock_layout::named! {
///     /// What a signal shows.
///     #[derive(Clone, Copy, Debug, PartialEq)]
///     pub enum Signal {
///         /// Nobody passes.
///         Stop = "stop",
///         /// All pass.
///         Go = "go",
///     }
/// }
///
/// assert_eq!(Signal::ALL, [Signal::Stop, Signal::Go]);
/// assert_eq!(Signal::Go.name(), "go");
/// assert_eq!(Signal::named("stop"), Some(Signal::Stop));
/// assert_eq!(Signal::named("Stop"), None);
/// ```
#[macro_export]
macro_rules! named {
    (
        $(#[$about:meta])*
        pub enum $Enum:ident {
            $($(#[$about_entry:meta])* $Entry:ident = $name:literal,)+
        }
    ) => {
        $(#[$about])*
        pub enum $Enum {
            $($(#[$about_entry])* $Entry,)+
        }

        impl $Enum {
            /// All of them, in order.
            pub const ALL: [Self; [$($name),+].len()] = [$(Self::$Entry),+];

            /// The stable name.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$Entry => $name,)+
                }
            }

            /// The one of this [name](Self::name), if there is one.
            pub fn named(name: &str) -> Option<Self> {
                match name {
                    $($name => Some(Self::$Entry),)+
                    _ => None,
                }
            }
        }
    };
}
