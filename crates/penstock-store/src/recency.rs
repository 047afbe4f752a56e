//! When a value counts as used: the end of a prompt before its beginning, without which it is of no use.

use std::time::Duration;

/// So much earlier a value counts as used for each token before it in its prompt. Those that are
/// stored while a prompt is computed come as far apart, at 2,500 tokens a second, and from faster engines
/// nearer: so the end of a prompt is older than its beginning. A million tokens are under seven minutes.
const A_TOKEN: Duration = Duration::from_micros(400);

/// How much earlier than now a value was used that is used now, with so many tokens before it.
pub(crate) fn earlier(position: u64) -> Duration {
    A_TOKEN.saturating_mul(position.try_into().unwrap_or(u32::MAX))
}
