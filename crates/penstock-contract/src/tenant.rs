//! Tenants: whose objects a namespace holds, if it holds those of one tenant alone.
//!
//! A tenant's namespace is made from the namespace that its objects would otherwise have, and from
//! a digest of the tenant's name. So a store can tell by a key alone whose object it is, whatever
//! the model.

use std::fmt;

use ring::digest::{SHA256, digest};

use crate::{Error, ErrorKind, Namespace, Result};

/// What a tenant's namespace keeps of the namespace it was made from, in bytes. With a million
/// namespaces in a pool, two of them share these with a probability of 3e-8.
const KEPT_BYTES: usize = 8;
/// Follows what is kept. A namespace of no tenant has these bytes there with a probability of 6e-8.
/// It then counts as a tenant's that nobody has a name for.
const MARK: [u8; 3] = [0x7e, 0x4a, 0x07];
/// Bytes of a tenant.
pub const TENANT_BYTES: usize = crate::NAMESPACE_BYTES - KEPT_BYTES - MARK.len();
const DOMAIN: &[u8] = b"penstock tenant 1\n";
const LONGEST_NAME: usize = 64;

/// A tenant, as namespaces name it: a digest of its name.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Tenant([u8; TENANT_BYTES]);

impl Tenant {
    /// The tenant of this name: 1 to 64 letters, digits, dots, dashes and underscores. Other names
    /// fail with [`ErrorKind::Config`].
    ///
    /// ```
    /// use penstock_contract::{Namespace, Tenancy, Tenant};
    ///
    /// let red = Tenant::named("red")?;
    /// let shared = Namespace(*b"who may share it");
    /// assert_eq!(shared.tenant(), None);
    /// assert_eq!(shared.of_tenant(red).tenant(), Some(red));
    /// # Ok::<(), penstock_contract::Error>(())
    /// ```
    pub fn named(name: &str) -> Result<Self> {
        let allowed = |c: u8| c.is_ascii_alphanumeric() || b"._-".contains(&c);
        if !(1..=LONGEST_NAME).contains(&name.len()) || !name.bytes().all(allowed) {
            return Err(Error::new(
                ErrorKind::Config,
                "a tenant's name has 1 to 64 letters, digits, dots, dashes and underscores",
            ));
        }
        let digest = digest(&SHA256, &[DOMAIN, name.as_bytes()].concat());
        let mut tenant = Self([0; TENANT_BYTES]);
        tenant.0.copy_from_slice(&digest.as_ref()[..TENANT_BYTES]);
        Ok(tenant)
    }

    /// The bytes from which [`from_bytes`](Self::from_bytes) makes the same tenant.
    pub fn to_bytes(self) -> [u8; TENANT_BYTES] {
        self.0
    }

    /// The tenant whose bytes these are.
    pub fn from_bytes(bytes: [u8; TENANT_BYTES]) -> Self {
        Self(bytes)
    }
}

impl fmt::Display for Tenant {
    /// The digest's ten digits, the last ones of the tenant's namespaces.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Tenant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tenant({self})")
    }
}

/// The tenants' share in a [`Namespace`].
pub trait Tenancy {
    /// The namespace for those of its objects that belong to one tenant. A tenant's namespace that
    /// is made from another tenant's is the same as if it were made from the first namespace.
    #[must_use]
    fn of_tenant(self, tenant: Tenant) -> Self;

    /// What all namespaces have in common that are made from one: itself, and those of tenants.
    fn family(self) -> [u8; KEPT_BYTES];

    /// The tenant whose objects alone are in this namespace. `None` if it is no tenant's.
    fn tenant(self) -> Option<Tenant>;
}

impl Tenancy for Namespace {
    fn of_tenant(self, tenant: Tenant) -> Self {
        let mut made = self;
        let (mark, rest) = made.0[KEPT_BYTES..].split_at_mut(MARK.len());
        mark.copy_from_slice(&MARK);
        rest.copy_from_slice(&tenant.0);
        made
    }

    fn family(self) -> [u8; KEPT_BYTES] {
        let mut kept = [0; KEPT_BYTES];
        kept.copy_from_slice(&self.0[..KEPT_BYTES]);
        kept
    }

    fn tenant(self) -> Option<Tenant> {
        let (mark, rest) = self.0[KEPT_BYTES..].split_at(MARK.len());
        (mark == MARK).then(|| {
            let mut tenant = Tenant([0; TENANT_BYTES]);
            tenant.0.copy_from_slice(rest);
            tenant
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_are_no_names_are_refused() {
        for name in ["a", "team-7_b.c", &"x".repeat(64)] {
            assert!(Tenant::named(name).is_ok(), "{name}");
        }
        for name in ["", " ", "a b", "a/b", "*", "ä", &"x".repeat(65)] {
            assert_eq!(
                Tenant::named(name).unwrap_err().kind(),
                ErrorKind::Config,
                "{name}"
            );
        }
    }

    #[test]
    fn tenants_and_models_are_told_apart() {
        let (red, blue) = (
            Tenant::named("red").unwrap(),
            Tenant::named("blue").unwrap(),
        );
        let (one, other) = (
            Namespace(*b"0123456789abcdef"),
            Namespace(*b"1123456789abcdef"),
        );
        let all = [
            one,
            other,
            one.of_tenant(red),
            one.of_tenant(blue),
            other.of_tenant(red),
        ];
        for (i, a) in all.iter().enumerate() {
            for b in &all[i + 1..] {
                assert_ne!(a, b);
            }
        }
        assert_eq!(other.of_tenant(red).tenant(), Some(red));
        assert_eq!(other.of_tenant(red).family(), other.family());
        assert_ne!(one.family(), other.family());
        assert_eq!(one.of_tenant(red).of_tenant(blue), one.of_tenant(blue));
        // Stored objects are found by it: it must never change.
        assert_eq!(
            one.of_tenant(red).to_string(),
            "3031323334353637\
             7e4a07\
             d97ad322b0"
        );
    }
}
