//! Makes a library of a store, which Penstock loads. All that its author writes besides the store:
//!
//! ```
//! # use std::time::Instant;
//! # use penstock_store_plugin::contract::*;
//! # use penstock_store_plugin::Open;
//! # struct MyStore;
//! # impl Store for MyStore {
//! #     fn capabilities(&self) -> Capabilities { unimplemented!() }
//! #     fn url(&self) -> String { unimplemented!() }
//! #     fn contains(&self, _: &[Key], _: Instant) -> Result<Vec<bool>> { unimplemented!() }
//! #     fn put_many(&self, _: &mut [PutRequest<'_>], _: Instant) {}
//! #     fn get_many(&self, _: &mut [GetRequest<'_, '_>], _: Instant) {}
//! #     fn touch(&self, _: &[(Key, u64)], _: Instant) -> Result<Vec<bool>> { unimplemented!() }
//! #     fn remove(&self, _: &[Key], _: Instant) -> Result<u64> { unimplemented!() }
//! #     fn list(&self, _: Option<Namespace>, _: &mut dyn FnMut(Listed), _: Instant) -> Result<()> {
//! #         unimplemented!()
//! #     }
//! #     fn describe(&self, _: Instant) -> Result<Vec<(String, String)>> { unimplemented!() }
//! #     fn stats(&self) -> StoreStats { unimplemented!() }
//! # }
//! impl Open for MyStore {
//!     fn open(url: &str) -> Result<Self> {
//! #       let _ = url;
//!         // …
//! #       Ok(MyStore)
//!     }
//! }
//!
//! penstock_store_plugin::export!(MyStore);
//! ```

pub mod abi;
mod export;

pub use export::Open;
/// The contract that the store fulfils.
pub use penstock_contract as contract;

/// Exports a store, which implements [`Open`]: once in a library, of the crate type `cdylib`.
#[macro_export]
macro_rules! export {
    ($store:ty) => {
        // A panic must become an error at the border.
        #[cfg(panic = "abort")]
        compile_error!("a store's library is built with panic = \"unwind\"");

        /// What Penstock looks for.
        #[unsafe(no_mangle)]
        pub static PENSTOCK_STORE: $crate::abi::Plugin = $crate::abi::Plugin::of::<$store>();
    };
}
