//! When a value counts as used. The end of a prompt is of no use without its beginning, so it
//! counts as used before the beginning.

use std::time::Duration;

/// How much earlier a value counts as used for each token before it in its prompt. If an engine
/// computes 2,500 tokens a second, it stores the values of a prompt this far apart; faster engines
/// store them closer together. So the end of a prompt counts as older than its beginning. A million
/// tokens make under seven minutes.
const A_TOKEN: Duration = Duration::from_micros(400);

/// How much earlier than now a value counts as used, if it is used now and has `position` tokens
/// before it in its prompt.
pub(crate) fn earlier(position: u64) -> Duration {
    A_TOKEN.saturating_mul(position.try_into().unwrap_or(u32::MAX))
}
