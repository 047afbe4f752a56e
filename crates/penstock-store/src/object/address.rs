//! Addresses of object stores: `s3://bucket/prefix?endpoint=…`, and how requests to them are made.

use std::sync::Arc;
use std::time::Duration;

use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::azure::MicrosoftAzureBuilder;
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::path::Path;
use object_store::{BackoffConfig, ClientOptions, RetryConfig};
use penstock_contract::{Error, ErrorKind, Result};
use penstock_value::parse_size;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use url::Url;

use super::rules::{Rules, region_of};
use super::transport::Connector;
use crate::OpenOptions;

pub(super) type Client = Arc<dyn object_store::ObjectStore>;

/// What a path in a URL must not have as it is.
const ESCAPED: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'/')
    .remove(b'.')
    .remove(b'-')
    .remove(b'_')
    .remove(b'~');

/// The schemes that this store opens.
pub(crate) const SCHEMES: [&str; 3] = ["s3", "gs", "az"];

/// How its URLs look.
pub(crate) const USAGE: &str = "s3://bucket[/prefix] (or gs://, az://)";

/// Sizes and times of one store. Each is a parameter of the URL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Settings {
    /// A pack with so many bytes of values is sent at once.
    pub(super) pack_bytes: u64,
    /// How long a pack waits for more values.
    pub(super) linger: Duration,
    /// The most bytes that one ranged request reads, unless a single value is longer.
    pub(super) range_bytes: u64,
    /// The most requests under way at once.
    pub(super) requests: usize,
    /// How old a listing may be that says that a key is not there.
    pub(super) fresh: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            pack_bytes: 16 << 20,
            linger: Duration::from_millis(50),
            range_bytes: 4 << 20,
            requests: 32,
            fresh: Duration::from_secs(1),
        }
    }
}

/// Which bucket, and where in it.
#[derive(Debug)]
pub(super) struct Address {
    scheme: &'static str,
    bucket: String,
    pub(super) prefix: Path,
    endpoint: Option<String>,
    region: Option<String>,
    is_unsigned: bool,
    is_virtual_hosted: bool,
    pub(super) settings: Settings,
}

impl Address {
    /// Reads a URL. No error repeats it: it may hold credentials by mistake.
    pub(super) fn parse(text: &str) -> Result<Self> {
        let url = Url::parse(text).map_err(|_| config("not the URL of an object store"))?;
        let scheme = SCHEMES
            .into_iter()
            .find(|scheme| *scheme == url.scheme())
            .ok_or_else(|| config("not the URL of an object store"))?;
        if !url.username().is_empty() || url.password().is_some() {
            return Err(config(
                "the URL of an object store holds no credentials: they come from the environment \
                 (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY), a web identity or the machine",
            ));
        }
        let bucket = url.host_str().filter(|_| url.port().is_none());
        let bucket = bucket.ok_or_else(|| config("the URL of an object store names a bucket"))?;
        if url.fragment().is_some() {
            return Err(config("a pool URL has no fragment"));
        }
        let prefix = Path::from_url_path(url.path().trim_matches('/'))
            .map_err(|_| config("what follows the bucket is not a path of objects"))?;
        let mut address = Self {
            scheme,
            bucket: bucket.to_owned(),
            prefix,
            endpoint: None,
            region: None,
            is_unsigned: false,
            is_virtual_hosted: false,
            settings: Settings::default(),
        };
        for (name, value) in url.query_pairs() {
            address.set(&name, &value)?;
        }
        Ok(address)
    }

    fn set(&mut self, name: &str, value: &str) -> Result<()> {
        let settings = &mut self.settings;
        match (name, value) {
            ("endpoint", _) => self.endpoint = Some(endpoint_of(value)?),
            ("region", _) if is_word(value) => self.region = Some(value.to_owned()),
            ("unsigned", "true" | "false") => self.is_unsigned = value == "true",
            ("style", "path" | "virtual") => self.is_virtual_hosted = value == "virtual",
            ("pack", _) => settings.pack_bytes = size_within(value, 4 << 10, 64 << 20)?,
            ("range", _) => settings.range_bytes = size_within(value, 4 << 10, 64 << 20)?,
            ("linger", _) => settings.linger = milliseconds(value, 10_000)?,
            ("fresh", _) => settings.fresh = milliseconds(value, 3_600_000)?,
            ("requests", _) => {
                settings.requests = value
                    .parse()
                    .ok()
                    .filter(|requests| (1..=1024).contains(requests))
                    .ok_or_else(|| config("requests is a number from 1 to 1024"))?;
            }
            // The error does not repeat the name, nor the value.
            _ => {
                return Err(config(
                    "the query of an object store's URL holds endpoint, region, style (path or \
                     virtual), unsigned (true or false), pack, range, linger, fresh and requests, \
                     and nothing else; credentials come from the environment",
                ));
            }
        }
        Ok(())
    }

    /// The URL that opens this store, all settings aside that are as by default.
    pub(super) fn url(&self) -> String {
        let mut url = format!("{}://{}", self.scheme, self.bucket);
        if !self.prefix.as_ref().is_empty() {
            url.push('/');
            url.extend(utf8_percent_encode(self.prefix.as_ref(), ESCAPED));
        }
        let default = Settings::default();
        let settings = &self.settings;
        let mut query = url::form_urlencoded::Serializer::new(String::new());
        if let Some(endpoint) = &self.endpoint {
            query.append_pair("endpoint", endpoint);
        }
        if let Some(region) = &self.region {
            query.append_pair("region", region);
        }
        for (name, value, usual) in [
            ("style", "virtual".to_owned(), !self.is_virtual_hosted),
            ("unsigned", "true".to_owned(), !self.is_unsigned),
            (
                "pack",
                settings.pack_bytes.to_string(),
                settings.pack_bytes == default.pack_bytes,
            ),
            (
                "range",
                settings.range_bytes.to_string(),
                settings.range_bytes == default.range_bytes,
            ),
            (
                "linger",
                format!("{}ms", settings.linger.as_millis()),
                settings.linger == default.linger,
            ),
            (
                "fresh",
                format!("{}ms", settings.fresh.as_millis()),
                settings.fresh == default.fresh,
            ),
            (
                "requests",
                settings.requests.to_string(),
                settings.requests == default.requests,
            ),
        ] {
            if !usual {
                query.append_pair(name, &value);
            }
        }
        let query = query.finish();
        if query.is_empty() {
            url
        } else {
            format!("{url}?{query}")
        }
    }

    /// Makes the client. It connects with the first request. With S3, also asks for the bucket's
    /// rules.
    pub(super) fn client(&self, options: &OpenOptions) -> Result<(Client, Option<Rules>)> {
        // The client takes the process's provider. If there is one already, that one serves as well.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let client = match self.scheme {
            "gs" => self.google(options).map(|client| (client, None)),
            "az" => self.azure(options).map(|client| (client, None)),
            _ => self.s3(options),
        };
        // The error may have what the environment holds.
        client.map_err(|_| {
            let what = match self.scheme {
                "az" => "an az:// pool needs AZURE_STORAGE_ACCOUNT_NAME in the environment",
                _ => {
                    "the URL and the environment's settings for the object store do not go together"
                }
            };
            config(what).with("store", self.url())
        })
    }

    fn google(&self, options: &OpenOptions) -> object_store::Result<Client> {
        let mut builder = GoogleCloudStorageBuilder::from_env()
            .with_bucket_name(&self.bucket)
            .with_skip_signature(self.is_unsigned)
            .with_retry(retries())
            .with_http_connector(self.connector(options))
            .with_client_options(self.http());
        if let Some(endpoint) = &self.endpoint {
            builder = builder.with_base_url(endpoint);
        }
        Ok(Arc::new(builder.build()?))
    }

    fn azure(&self, options: &OpenOptions) -> object_store::Result<Client> {
        let mut builder = MicrosoftAzureBuilder::from_env()
            .with_container_name(&self.bucket)
            .with_skip_signature(self.is_unsigned)
            .with_retry(retries())
            .with_http_connector(self.connector(options))
            .with_client_options(self.http());
        if let Some(endpoint) = &self.endpoint {
            builder = builder.with_endpoint(endpoint.clone());
        }
        Ok(Arc::new(builder.build()?))
    }

    fn s3(&self, options: &OpenOptions) -> object_store::Result<(Client, Option<Rules>)> {
        let mut builder = AmazonS3Builder::from_env()
            .with_bucket_name(&self.bucket)
            .with_skip_signature(self.is_unsigned)
            .with_virtual_hosted_style_request(self.is_virtual_hosted)
            .with_retry(retries())
            .with_http_connector(self.connector(options))
            .with_client_options(self.http());
        if let Some(endpoint) = &self.endpoint {
            builder = builder.with_endpoint(endpoint);
        }
        if let Some(region) = &self.region {
            builder = builder.with_region(region);
        }
        let region = region_of(&builder);
        // The environment may have one, too.
        let endpoint = builder.get_config_value(&AmazonS3ConfigKey::Endpoint);
        let endpoint = endpoint.map(|endpoint| endpoint.trim_end_matches('/').to_owned());
        let client = builder.build()?;
        let bucket_url = match (&endpoint, &region) {
            (Some(endpoint), _) if self.is_virtual_hosted => endpoint.clone(),
            (Some(endpoint), _) => format!("{endpoint}/{}", self.bucket),
            (None, Some(region)) => {
                format!("https://s3.{region}.amazonaws.com/{}", self.bucket)
            }
            (None, None) => format!("https://s3.us-east-1.amazonaws.com/{}", self.bucket),
        };
        let rules = Rules::of(
            &client,
            region,
            bucket_url,
            self.prefix.as_ref(),
            self.is_unsigned,
            &self.connector(options),
            &self.http(),
        );
        Ok((Arc::new(client), rules))
    }

    /// Whether the store is asked without TLS.
    fn is_plain(&self) -> bool {
        match &self.endpoint {
            Some(endpoint) => endpoint.starts_with("http://"),
            None => std::env::var("AWS_ALLOW_HTTP").is_ok_and(|allowed| allowed == "true"),
        }
    }

    fn connector(&self, options: &OpenOptions) -> Connector {
        Connector {
            connect_timeout: options.connect_timeout,
            is_plain: self.is_plain(),
        }
    }

    fn http(&self) -> ClientOptions {
        ClientOptions::new().with_allow_http(self.is_plain())
    }
}

/// Retries of one request, with jitter. The caller's deadline ends them too.
fn retries() -> RetryConfig {
    RetryConfig {
        backoff: BackoffConfig {
            init_backoff: Duration::from_millis(100),
            max_backoff: Duration::from_secs(5),
            base: 2.0,
        },
        max_retries: 10,
        retry_timeout: Duration::from_secs(60),
    }
}

fn endpoint_of(text: &str) -> Result<String> {
    let url = Url::parse(text).ok().filter(|url| {
        matches!(url.scheme(), "http" | "https")
            && url.has_host()
            && url.username().is_empty()
            && url.password().is_none()
            && url.query().is_none()
            && url.fragment().is_none()
    });
    let url =
        url.ok_or_else(|| config("endpoint is a URL of http or https without credentials"))?;
    Ok(url.as_str().trim_end_matches('/').to_owned())
}

fn is_word(text: &str) -> bool {
    let is_part = |byte: u8| byte.is_ascii_alphanumeric() || b"-_".contains(&byte);
    !text.is_empty() && text.bytes().all(is_part)
}

fn size_within(text: &str, least: u64, most: u64) -> Result<u64> {
    parse_size(text)
        .ok()
        .filter(|size| (least..=most).contains(size))
        .ok_or_else(|| config("pack and range are sizes from 4KiB to 64MiB"))
}

/// Reads `250ms` or `1.5s`.
fn milliseconds(text: &str, most: u64) -> Result<Duration> {
    let (number, factor) = match text.strip_suffix("ms") {
        Some(number) => (number, 1e-3),
        None => (text.strip_suffix('s').unwrap_or(""), 1.0),
    };
    let seconds = number.parse::<f64>().ok().map(|number| number * factor);
    seconds
        .filter(|seconds| (0.0..=most as f64 / 1e3).contains(seconds))
        .map(|seconds| Duration::from_millis((seconds * 1e3).round() as u64))
        .ok_or_else(|| {
            config("linger and fresh are times such as 50ms or 2s; at most 10s and one hour")
        })
}

fn config(message: &str) -> Error {
    Error::new(ErrorKind::Config, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls() {
        let address = Address::parse(
            "s3://kv-cache/team/a?endpoint=http://127.0.0.1:9000/&region=eu-west-1&pack=8MiB\
             &linger=0ms&fresh=1.5s&range=1MiB&requests=4&style=virtual&unsigned=true",
        )
        .unwrap();
        assert_eq!(address.prefix.as_ref(), "team/a");
        let expected = Settings {
            pack_bytes: 8 << 20,
            linger: Duration::ZERO,
            range_bytes: 1 << 20,
            requests: 4,
            fresh: Duration::from_millis(1500),
        };
        assert_eq!(address.settings, expected);
        let url = address.url();
        assert_eq!(
            url,
            "s3://kv-cache/team/a?endpoint=http%3A%2F%2F127.0.0.1%3A9000&region=eu-west-1\
             &style=virtual&unsigned=true&pack=8388608&range=1048576&linger=0ms&fresh=1500ms\
             &requests=4"
        );
        assert_eq!(Address::parse(&url).unwrap().url(), url);
        for url in [
            "s3://bucket",
            "gs://bucket/a",
            "az://container/a/b",
            "s3://b/a%20b/%C3%A9",
        ] {
            assert_eq!(Address::parse(url).unwrap().url(), url);
        }
    }

    #[test]
    fn wrong_urls_are_refused_and_never_repeated() {
        for url in [
            "s3://",
            "s3://key:hunter2@bucket",
            "s3://hunter2@bucket",
            "s3://bucket:80",
            "s3://bucket/a#hunter2",
            "s3://bucket/a//b",
            "s3://bucket?hunter2",
            "s3://bucket?secret_access_key=hunter2",
            "s3://bucket?endpoint=hunter2",
            "s3://bucket?endpoint=http://me:hunter2@host",
            "s3://bucket?endpoint=ftp://host",
            "s3://bucket?region=a/b",
            "s3://bucket?unsigned=hunter2",
            "s3://bucket?style=other",
            "s3://bucket?pack=1GiB",
            "s3://bucket?range=1",
            "s3://bucket?linger=hunter2",
            "s3://bucket?linger=-1ms",
            "s3://bucket?fresh=NaNs",
            "s3://bucket?fresh=2h",
            "s3://bucket?requests=0",
            "s4://bucket",
            "hunter2",
        ] {
            let error = Address::parse(url).expect_err(url);
            assert_eq!(error.kind(), ErrorKind::Config, "{url}");
            assert!(!format!("{error} {error:?}").contains("hunter2"), "{url}");
        }
    }
}
