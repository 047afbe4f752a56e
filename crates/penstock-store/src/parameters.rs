//! What the URLs of the stores have in common that this crate bounds: a parsed URL, and `size`.

use penstock_contract::{Error, ErrorKind, Result};
use penstock_value::parse_size;
use url::Url;

/// The error for a URL that is not as `usage` says.
pub(crate) fn refused(problem: &str, usage: &str) -> Error {
    Error::new(ErrorKind::Config, format!("{problem}; accepted: {usage}"))
}

/// Parses a URL, which has no fragment.
pub(crate) fn parse(url: &str, usage: &str) -> Result<Url> {
    let url =
        Url::parse(url).map_err(|error| refused(&format!("not a pool URL: {error}"), usage))?;
    if url.fragment().is_some() {
        let problem = "a pool URL has no fragment: write '#' in a path as %23";
        return Err(refused(problem, usage));
    }
    Ok(url)
}

/// Reads the parameter `size`, in bytes, beside parameters of other names that `takes` takes. There
/// are no others.
pub(crate) fn size_beside(
    url: &Url,
    usage: &str,
    takes: &mut dyn FnMut(&str, &str) -> bool,
) -> Result<Option<u64>> {
    let mut size = None;
    for (name, value) in url.query_pairs() {
        match &*name {
            "size" if size.is_none() => {
                size = Some(parse_size(&value)?).filter(|&size| size > 0);
                if size.is_none() {
                    return Err(refused("a pool of no bytes holds nothing", usage));
                }
            }
            _ if takes(&name, &value) => {}
            _ => {
                let problem = format!(
                    "parameter {name:?} is unknown, given twice, or has a value that it cannot have"
                );
                return Err(refused(&problem, usage));
            }
        }
    }
    Ok(size)
}

/// Reads the parameter `size`, in bytes, if there is no other.
pub(crate) fn size(url: &Url, usage: &str) -> Result<Option<u64>> {
    size_beside(url, usage, &mut |_, _| false)
}
