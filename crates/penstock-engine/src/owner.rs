//! Owners: whose blocks a job moves.

use std::sync::Arc;

use penstock_contract::{Namespace, Tenancy, Tenant};

/// Whose blocks a job moves. By default, they are for everybody who computes the same.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Owner {
    /// A value that only one user's requests have. It goes into the encryption beside the keys, and
    /// a load must give the same one. Without keys it has no effect. Empty for none.
    pub salt: Arc<[u8]>,
    /// If given, the objects lie in namespaces of this tenant.
    pub tenant: Option<Tenant>,
}

impl Owner {
    /// The namespace of this owner's objects of a group with the namespace `shared`.
    pub(crate) fn namespace(&self, shared: Namespace) -> Namespace {
        self.tenant
            .map_or(shared, |tenant| shared.of_tenant(tenant))
    }
}
