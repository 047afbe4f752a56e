//! What a bucket's own rules say of objects that grow old. Penstock never deletes for room, so these
//! rules are all that bounds a pool in an S3 bucket.

use object_store::ClientOptions;
use object_store::aws::{AmazonS3, AmazonS3ConfigKey, AwsAuthorizer, AwsCredentialProvider};
use object_store::client::{HttpClient, HttpConnector, HttpRequestBody};

use super::failure::between;

/// Where an S3 bucket's rules are asked for.
pub(super) struct Rules {
    http: HttpClient,
    credentials: Option<AwsCredentialProvider>,
    bucket_url: String,
    region: String,
    prefix: String,
}

/// What a bucket's rules say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Lifetimes {
    /// After how many days packs expire.
    pub(super) expire_days: Option<u32>,
    /// After how many days parts of uploads that never ended are deleted.
    pub(super) parts_days: Option<u32>,
}

impl Rules {
    /// Makes a client that asks for the bucket's rules. None if that cannot be made.
    pub(super) fn of(
        client: &AmazonS3,
        region: Option<String>,
        bucket_url: String,
        prefix: &str,
        is_unsigned: bool,
        connector: &impl HttpConnector,
        options: &ClientOptions,
    ) -> Option<Self> {
        Some(Self {
            http: connector.connect(options).ok()?,
            credentials: (!is_unsigned).then(|| client.credentials().clone()),
            bucket_url,
            region: region.unwrap_or_else(|| "us-east-1".to_owned()),
            prefix: prefix.to_owned(),
        })
    }

    /// Asks the bucket. None if it does not tell, or not these credentials.
    pub(super) async fn ask(&self) -> Option<Lifetimes> {
        let request = http::Request::get(format!("{}?lifecycle", self.bucket_url));
        let mut request = request.body(HttpRequestBody::empty()).ok()?;
        if let Some(credentials) = &self.credentials {
            let credential = credentials.get_credential().await.ok()?;
            AwsAuthorizer::new(&credential, "s3", &self.region)
                .try_authorize(&mut request, None)
                .ok()?;
        }
        let answer = self.http.execute(request).await.ok()?;
        let status = answer.status();
        let text = answer.into_body().bytes().await.ok()?;
        let text = String::from_utf8_lossy(&text);
        if status.is_success() {
            return Some(lifetimes(&text, &self.prefix));
        }
        text.contains("NoSuchLifecycleConfiguration")
            .then(Lifetimes::default)
    }
}

/// The rules of a bucket's configuration that concern all objects below a prefix.
fn lifetimes(configuration: &str, prefix: &str) -> Lifetimes {
    // All names begin so.
    let prefix = match prefix {
        "" => String::new(),
        prefix => format!("{prefix}/"),
    };
    let mut all = Lifetimes::default();
    let rules = configuration.split("<Rule>").skip(1);
    for rule in rules.filter(|rule| rule.contains("<Status>Enabled</Status>")) {
        let of_rule = between(rule, "<Prefix>", "</Prefix>").unwrap_or_default();
        // A rule for tags or sizes does not concern all objects.
        let is_partial = rule.contains("<Tag>") || rule.contains("<ObjectSize");
        if is_partial || !prefix.starts_with(of_rule) {
            continue;
        }
        let days = |outer: &str, inner: &str| -> Option<u32> {
            let part = between(rule, &format!("<{outer}>"), &format!("</{outer}>"))?;
            between(part, &format!("<{inner}>"), &format!("</{inner}>"))?
                .trim()
                .parse()
                .ok()
        };
        let sooner = |a: Option<u32>, b: Option<u32>| a.into_iter().chain(b).min();
        all.expire_days = sooner(all.expire_days, days("Expiration", "Days"));
        let parts = days("AbortIncompleteMultipartUpload", "DaysAfterInitiation");
        all.parts_days = sooner(all.parts_days, parts);
    }
    all
}

/// What a builder knows of its region.
pub(super) fn region_of(builder: &object_store::aws::AmazonS3Builder) -> Option<String> {
    builder.get_config_value(&AmazonS3ConfigKey::Region)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_soonest_rule_that_concerns_the_prefix_counts() {
        let rule = |status: &str, filter: &str, days: u32| {
            format!(
                "<Rule><ID>r</ID><Filter>{filter}</Filter><Status>{status}</Status>\
                 <Expiration><Days>{days}</Days></Expiration></Rule>"
            )
        };
        let configuration = [
            "<LifecycleConfiguration>".to_owned(),
            rule("Enabled", "<Prefix>kv</Prefix>", 30),
            rule("Enabled", "<Prefix></Prefix>", 60),
            rule("Disabled", "<Prefix></Prefix>", 1),
            rule("Enabled", "<Prefix>other</Prefix>", 2),
            rule("Enabled", "<Tag><Key>a</Key><Value>b</Value></Tag>", 3),
            "<Rule><Prefix/><Status>Enabled</Status><AbortIncompleteMultipartUpload>\
             <DaysAfterInitiation>7</DaysAfterInitiation></AbortIncompleteMultipartUpload></Rule>"
                .to_owned(),
        ]
        .concat();
        let found = lifetimes(&configuration, "kv/cache");
        assert_eq!((found.expire_days, found.parts_days), (Some(30), Some(7)));
        assert_eq!(lifetimes(&configuration, "x").expire_days, Some(60));
        let guide = rule("Enabled", "<Prefix>prod/</Prefix>", 7);
        assert_eq!(lifetimes(&guide, "prod").expire_days, Some(7));
        assert_eq!(lifetimes(&guide, "production").expire_days, None);
        assert_eq!(lifetimes(&guide, "").expire_days, None);
        assert_eq!(lifetimes("", "kv"), Lifetimes::default());
        assert_eq!(
            lifetimes("nonsense <Rule> <Days>1</Days>", "kv"),
            Lifetimes::default()
        );
    }
}
