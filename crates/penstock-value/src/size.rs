//! Sizes as people write them.

use penstock_contract::{Error, ErrorKind, Result};

/// Reads a size in bytes: `10GiB`, `512MiB`, `1.5G`, `64kB`, `4096`.
///
/// `K`, `M`, `G`, `T` and `KiB`, `MiB`, `GiB`, `TiB` are powers of 1024; `kB`, `MB`, `GB`, `TB` are
/// powers of 1000; case does not matter. Parts of a byte are dropped. Fails with
/// [`ErrorKind::Config`] on anything else and beyond 2^64 bytes.
pub fn parse_size(text: &str) -> Result<u64> {
    exact_size(text.trim()).ok_or_else(|| {
        Error::new(
            ErrorKind::Config,
            format!("not a size: {text:?}; write bytes, or a number with KiB, MiB, GiB or TiB"),
        )
    })
}

fn exact_size(text: &str) -> Option<u64> {
    let digits = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let unit: u128 = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kib" => 1 << 10,
        "m" | "mib" => 1 << 20,
        "g" | "gib" => 1 << 30,
        "t" | "tib" => 1 << 40,
        "kb" => 1000,
        "mb" => 1000_u128.pow(2),
        "gb" => 1000_u128.pow(3),
        "tb" => 1000_u128.pow(4),
        _ => return None,
    };
    let (whole, part) = number.split_once('.').unwrap_or((number, "0"));
    // Twelve decimals are finer than a byte of a tebibyte and keep the products in range.
    if part.is_empty() || part.len() > 12 {
        return None;
    }
    let whole = u128::from(whole.parse::<u64>().ok()?);
    let part: u128 = part.parse().ok()?;
    let decimals = 10_u128.pow(
        number
            .split_once('.')
            .map_or(1, |(_, part)| part.len() as u32),
    );
    u64::try_from(whole * unit + part * unit / decimals).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("10GiB", 10 << 30),
            ("512MiB", 512 << 20),
            ("1G", 1 << 30),
            ("1.5 GiB", 3 << 29),
            ("64kB", 64_000),
            ("2tib", 2 << 40),
            ("0.001K", 1),
            ("7b", 7),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(parse_size(text).unwrap(), bytes, "{text}");
        }
    }

    #[test]
    fn not_sizes() {
        for text in [
            "",
            "G",
            "-1",
            "1.2.3G",
            "1.",
            ".5G",
            "1e9",
            "10GiBs",
            "16777216T",
            "ten",
        ] {
            let error = parse_size(text).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config, "{text}");
        }
    }
}
