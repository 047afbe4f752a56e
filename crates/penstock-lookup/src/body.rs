//! A router's question, read from its JSON: a prompt's numbers become tokens and nothing between.

use std::fmt;

use serde::Deserialize;
use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserializer, MapAccess, SeqAccess, Visitor};

/// The most characters that an error repeats of a field's path, and of what is wrong with the field:
/// each may be as long as the body.
const MOST_SAID: usize = 200;

/// The prompt of a question.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Prompt {
    /// Token ids.
    Tokens(Vec<u32>),
    /// Text, which a tokenizer has to read.
    Text(String),
}

/// The adapter of a question.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Adapter {
    /// An adapter that the service knows by this name.
    Named(String),
    /// An adapter that the question describes.
    Given(AdapterContent),
}

/// What names an adapter in block hashes.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AdapterContent {
    /// The adapter's name in the engine.
    pub name: String,
    /// The path that the engine was given.
    pub path: String,
    /// The digest of the adapter's content.
    pub digest: String,
}

/// A question, as it came.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Body {
    /// The model's name.
    pub model: String,
    /// The prompt.
    pub prompt: Prompt,
    /// The request's cache salt.
    pub cache_salt: Option<String>,
    /// The LoRA adapter.
    pub lora: Option<Adapter>,
    /// The tenant that the request names.
    pub tenant: Option<String>,
}

/// Why a body is no question.
#[derive(Debug, thiserror::Error)]
pub enum BodyError {
    /// The body is no JSON.
    #[error("the body is no JSON: {0}")]
    Json(serde_json::Error),
    /// The body is something else than an object.
    #[error("the body is no JSON object")]
    Kind,
    /// A field of the object is wrong, missing or not known: its path, if it has one, and why.
    #[error("{0}")]
    Field(String),
    /// The prompt is too long.
    #[error("a prompt may have {0} tokens here")]
    Length(usize),
    /// An adapter without a name, a path or a digest.
    #[error("\"lora\" has an empty part: it needs name, path, digest")]
    EmptyAdapter,
}

impl Body {
    /// Reads a question whose prompt has at most so many tokens. A longer prompt is read whole, and
    /// then refused.
    ///
    /// # Errors
    /// The body is no question, and why.
    pub fn read(bytes: &[u8], most_tokens: usize) -> Result<Self, BodyError> {
        // A list would be read as an object's values, in order.
        if bytes.trim_ascii_start().first().is_some_and(|&c| c != b'{') {
            return Err(BodyError::Kind);
        }
        let body: Self =
            serde_json::from_slice(bytes).map_err(|error| BodyError::of(bytes, error))?;
        match &body.prompt {
            Prompt::Tokens(tokens) if tokens.len() > most_tokens => {
                return Err(BodyError::Length(most_tokens));
            }
            _ => {}
        }
        match &body.lora {
            Some(Adapter::Given(AdapterContent { name, path, digest }))
                if [name, path, digest].iter().any(|part| part.is_empty()) =>
            {
                Err(BodyError::EmptyAdapter)
            }
            _ => Ok(body),
        }
    }
}

impl BodyError {
    /// The error of bytes that were read with this one. They are read again to find the field.
    fn of(bytes: &[u8], error: serde_json::Error) -> Self {
        if !error.is_data() {
            return Self::Json(error);
        }
        let mut reader = serde_json::Deserializer::from_slice(bytes);
        let read: Result<Body, _> = serde_path_to_error::deserialize(&mut reader);
        let path = read.err().map(|error| error.path().to_string());
        let problem = cut(error.to_string());
        Self::Field(match path {
            Some(path) if path != "." => format!("{}: {problem}", cut(path)),
            _ => problem,
        })
    }
}

fn cut(mut text: String) -> String {
    if let Some((end, _)) = text.char_indices().nth(MOST_SAID) {
        text.truncate(end);
        text.push('…');
    }
    text
}

impl<'de> Deserialize<'de> for Adapter {
    fn deserialize<D: Deserializer<'de>>(reader: D) -> Result<Self, D::Error> {
        struct AsAdapter;

        impl<'de> Visitor<'de> for AsAdapter {
            type Value = Adapter;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an adapter's name, or an object of name, path, digest")
            }

            fn visit_str<E>(self, name: &str) -> Result<Adapter, E> {
                Ok(Adapter::Named(name.to_owned()))
            }

            fn visit_map<A: MapAccess<'de>>(self, object: A) -> Result<Adapter, A::Error> {
                AdapterContent::deserialize(MapAccessDeserializer::new(object)).map(Adapter::Given)
            }
        }

        reader.deserialize_any(AsAdapter)
    }
}

impl<'de> Deserialize<'de> for Prompt {
    fn deserialize<D: Deserializer<'de>>(reader: D) -> Result<Self, D::Error> {
        struct AsPrompt;

        impl<'de> Visitor<'de> for AsPrompt {
            type Value = Prompt;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of token ids, or text")
            }

            fn visit_str<E>(self, text: &str) -> Result<Prompt, E> {
                Ok(Prompt::Text(text.to_owned()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Prompt, A::Error> {
                let mut tokens = Vec::new();
                while let Some(token) = list.next_element()? {
                    tokens.push(token);
                }
                Ok(Prompt::Tokens(tokens))
            }
        }

        reader.deserialize_any(AsPrompt)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    fn read(value: &Value) -> Result<Body, String> {
        Body::read(value.to_string().as_bytes(), 8).map_err(|error| error.to_string())
    }

    #[test]
    fn a_question_has_what_was_sent() {
        let body = read(&json!({
            "model": "llama", "prompt": [1, 2, 4294967295_u32], "cache_salt": "s", "tenant": null,
            "lora": {"name": "a", "path": "b", "digest": "c"},
        }));
        let expected = Body {
            model: "llama".to_owned(),
            prompt: Prompt::Tokens(vec![1, 2, u32::MAX]),
            cache_salt: Some("s".to_owned()),
            lora: Some(Adapter::Given(AdapterContent {
                name: "a".to_owned(),
                path: "b".to_owned(),
                digest: "c".to_owned(),
            })),
            tenant: None,
        };
        assert_eq!(body.unwrap(), expected);
        let text = read(&json!({"model": "llama", "prompt": "text", "lora": "a"})).unwrap();
        assert_eq!(text.prompt, Prompt::Text("text".to_owned()));
        assert_eq!(text.lora, Some(Adapter::Named("a".to_owned())));
    }

    #[test]
    fn what_is_no_token_is_refused_wherever_it_stands() {
        for wrong in [
            "-1",
            "1.0",
            "1e2",
            "true",
            "null",
            "\"1\"",
            "[1]",
            "{\"a\":1}",
            "4294967296",
        ] {
            let body = format!("{{\"model\":\"m\",\"prompt\":[1,{wrong},2]}}");
            let error = Body::read(body.as_bytes(), 8).unwrap_err().to_string();
            assert!(error.starts_with("prompt[1]: "), "{wrong}: {error}");
        }
        let twice = Body::read(br#"{"model": "m", "model": "n", "prompt": []}"#, 8);
        assert!(twice.unwrap_err().to_string().contains("duplicate field"));
        let long = "x".repeat(1 << 20);
        for body in [
            json!({"model": "m", "prompt": [1, long]}),
            json!({"model": "m", "prompt": [], long: 1}),
        ] {
            let error = read(&body).unwrap_err();
            assert!(error.len() < 1000, "{} bytes", error.len());
        }
    }

    #[test]
    fn what_is_wrong_is_said_by_its_field() {
        for (wrong, said) in [
            (json!([["m", [1]]]), "no JSON object"),
            (json!(["m", [1]]), "no JSON object"),
            (json!({}), "missing field `model`"),
            (json!({"model": "m"}), "missing field `prompt`"),
            (json!({"model": 7, "prompt": []}), "model: invalid type"),
            (
                json!({"model": "m", "prompt": {}}),
                "a list of token ids, or text",
            ),
            (
                json!({"model": "m", "prompt": [], "n": 1}),
                "unknown field `n`",
            ),
            (
                json!({"model": "m", "prompt": [], "lora": {"name": "a"}}),
                "missing field `path`",
            ),
            (
                json!({"model": "m", "prompt": [], "lora": ["a", "b", "c"]}),
                "an object of name",
            ),
            (
                json!({"model": "m", "prompt": [], "lora": {"name": "a", "path": "", "digest": "d"}}),
                "empty part",
            ),
            (
                json!({"model": "m", "prompt": [], "tenant": ["x"]}),
                "tenant: invalid type",
            ),
        ] {
            let error = read(&wrong).unwrap_err();
            assert!(error.contains(said), "{wrong}: {error}");
        }
        let long = read(&json!({"model": "m", "prompt": [1, "x".repeat(1 << 20)]})).unwrap_err();
        assert!(long.len() < 500, "{long}");
    }

    proptest! {
        /// Whatever comes is refused, or it is JSON.
        #[test]
        fn foreign_bytes_are_no_harm(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let is_json = serde_json::from_slice::<Value>(&bytes).is_ok();
            prop_assert!(is_json || Body::read(&bytes, 8).is_err());
        }

        #[test]
        fn json_of_any_shape_is_no_harm(text in "[\\[\\]{}:,0-9a-z\"\\\\.\\- ]{0,60}") {
            let body = format!("{{\"model\":\"m\",\"prompt\":[1,{text}]}}");
            let is_json = serde_json::from_slice::<Value>(body.as_bytes()).is_ok();
            prop_assert!(is_json || Body::read(body.as_bytes(), 8).is_err());
        }
    }
}
