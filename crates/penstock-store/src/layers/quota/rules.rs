//! Which quotas a pool's URL gives, and whose objects each of them bounds.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt;

use penstock_contract::{Error, ErrorKind, Namespace, Result, Tenancy, Tenant};
use penstock_value::parse_size;

/// Whose objects a quota bounds together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Account {
    /// Objects of one namespace.
    Namespace(Namespace),
    /// Objects of one tenant, in all its namespaces.
    Tenant(Tenant),
}

/// The quotas of one pool, in bytes. See [`super::Quota`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Quotas {
    namespaces: BTreeMap<Namespace, u64>,
    /// With the tenants' names, which their digests do not tell.
    tenants: BTreeMap<Tenant, (String, u64)>,
    each_other_tenant: Option<u64>,
}

impl Quotas {
    /// Adds a quota as URLs have it: `tenant/NAME:SIZE`, `tenant/*:SIZE` for each tenant that has
    /// none of its own, or `namespace/HEX:SIZE`. Fails with [`ErrorKind::Config`] on anything else,
    /// and on a second quota for the same account.
    ///
    /// ```
    /// use penstock_store::layers::Quotas;
    ///
    /// let mut quotas = Quotas::default();
    /// quotas.add("tenant/red:1GiB")?;
    /// quotas.add("tenant/*:64MiB")?;
    /// assert!(quotas.add("tenant/red:2GiB").is_err());
    /// assert_eq!(quotas.to_string(), "quota=tenant/red:1073741824&quota=tenant/*:67108864");
    /// # Ok::<(), penstock_contract::Error>(())
    /// ```
    pub fn add(&mut self, text: &str) -> Result<()> {
        let parts = text
            .split_once('/')
            .and_then(|(kind, rest)| Some((kind, rest.rsplit_once(':')?)));
        let Some((kind, (name, size))) = parts else {
            return Err(wrong("not a quota", text));
        };
        let bytes = parse_size(size)?;
        if bytes == 0 {
            return Err(wrong("a quota of no bytes holds nothing", text));
        }
        let twice = || wrong("there are two quotas for the same account", text);
        match (kind, name) {
            ("tenant", "*") => {
                if self.each_other_tenant.is_some() {
                    return Err(twice());
                }
                self.each_other_tenant = Some(bytes);
            }
            ("tenant", name) => {
                let tenant = Tenant::named(name).map_err(|e| wrong(&e.to_string(), text))?;
                let Entry::Vacant(account) = self.tenants.entry(tenant) else {
                    return Err(twice());
                };
                account.insert((name.to_owned(), bytes));
            }
            ("namespace", hex) => {
                let namespace = Namespace::parse(hex)
                    .map_err(|_| wrong("a namespace has 32 hex digits", text))?;
                let Entry::Vacant(account) = self.namespaces.entry(namespace) else {
                    return Err(twice());
                };
                account.insert(bytes);
            }
            _ => return Err(wrong("not a quota", text)),
        }
        Ok(())
    }

    /// The accounts that objects of a namespace count for, each with its quota: none, one, or two
    /// if both the namespace and its tenant have a quota.
    pub(super) fn accounts_of(
        &self,
        namespace: Namespace,
    ) -> impl Iterator<Item = (Account, u64)> + Clone + use<> {
        let of_namespace = self
            .namespaces
            .get(&namespace)
            .map(|&bytes| (Account::Namespace(namespace), bytes));
        let of_tenant = || {
            let tenant = namespace.tenant()?;
            let own = self.tenants.get(&tenant).map(|&(_, bytes)| bytes);
            Some((Account::Tenant(tenant), own.or(self.each_other_tenant)?))
        };
        let of_tenant = if self.has_none_of_tenants() {
            None
        } else {
            of_tenant()
        };
        of_namespace.into_iter().chain(of_tenant)
    }

    /// Whether objects of a namespace count for any account.
    pub(super) fn concern(&self, namespace: Namespace) -> bool {
        self.accounts_of(namespace).next().is_some()
    }

    /// The accounts that have a quota of their own.
    pub(super) fn own(&self) -> impl Iterator<Item = (Account, u64)> {
        let namespaces = self
            .namespaces
            .iter()
            .map(|(&namespace, &bytes)| (Account::Namespace(namespace), bytes));
        let tenants = self
            .tenants
            .iter()
            .map(|(&tenant, &(_, bytes))| (Account::Tenant(tenant), bytes));
        namespaces.chain(tenants)
    }

    /// The quota of each tenant that has none of its own.
    pub(super) fn each_other_tenant(&self) -> Option<u64> {
        self.each_other_tenant
    }

    /// The namespaces that a census has to list. `None` if it has to list all that there are,
    /// because a tenant's namespaces are only known by their names.
    pub(super) fn namespaces(&self) -> Option<impl Iterator<Item = Namespace>> {
        self.has_none_of_tenants()
            .then(|| self.namespaces.keys().copied())
    }

    /// An account as URLs name it. Of a tenant without a quota of its own only the digest is known.
    pub(super) fn name_of(&self, account: Account) -> String {
        match account {
            Account::Namespace(namespace) => format!("namespace/{namespace}"),
            Account::Tenant(tenant) => match self.tenants.get(&tenant) {
                Some((name, _)) => format!("tenant/{name}"),
                None => format!("tenant/*/{tenant}"),
            },
        }
    }

    fn has_none_of_tenants(&self) -> bool {
        self.tenants.is_empty() && self.each_other_tenant.is_none()
    }
}

impl fmt::Display for Quotas {
    /// Writes the quotas as parameters of a URL: `quota=ACCOUNT:BYTES`, with `&` between.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let own = self
            .own()
            .map(|(account, bytes)| (self.name_of(account), bytes));
        let others = self
            .each_other_tenant
            .map(|bytes| ("tenant/*".to_owned(), bytes));
        for (i, (name, bytes)) in own.chain(others).enumerate() {
            write!(f, "{}quota={name}:{bytes}", if i == 0 { "" } else { "&" })?;
        }
        Ok(())
    }
}

fn wrong(problem: &str, text: &str) -> Error {
    Error::new(
        ErrorKind::Config,
        format!(
            "{problem}: {text:?}; write quota=tenant/NAME:10GiB, quota=tenant/*:1GiB for each \
             tenant without one of its own, or quota=namespace/HEX:10GiB with the 32 digits that \
             `penstock pool ls` shows"
        ),
    )
}
