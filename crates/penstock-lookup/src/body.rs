//! A router's question, read from its JSON: a prompt's numbers become tokens and nothing between.

use std::fmt;

use serde::de::{self, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

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
    /// One that the service knows by name.
    Named(String),
    /// The adapter's name, its path, and the digest of its content.
    Given([String; 3]),
}

/// A question, as it came.
#[derive(Clone, Debug, PartialEq, Eq)]
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
    Json(#[from] serde_json::Error),
    /// The body is JSON, but no object.
    #[error("the body is a JSON object")]
    Kind,
    /// The body has fields that are not known.
    #[error("a look-up has no {0}")]
    Unknown(String),
    /// The body has no model's name.
    #[error("a look-up needs \"model\": the model's name")]
    Model,
    /// The body has no prompt.
    #[error("a look-up needs \"prompt\": a list of token ids, or text")]
    Prompt,
    /// The prompt is too long.
    #[error("a prompt may have {0} tokens here")]
    Length(usize),
    /// A list with something else than token ids.
    #[error("a prompt is a list of token ids: whole numbers from 0 on")]
    Token,
    /// A field that is not text.
    #[error("\"{0}\" is text")]
    Text(&'static str),
    /// An adapter of another form.
    #[error("\"lora\" is an adapter's name, or an object of name, path, digest")]
    Adapter,
    /// An adapter without a name, a path or a digest.
    #[error("\"lora\" has an empty part: it needs name, path, digest")]
    EmptyAdapter,
}

impl Body {
    /// Reads a question whose prompt has at most so many tokens.
    ///
    /// # Errors
    /// It is no question, and why.
    pub fn read(bytes: &[u8], most_tokens: usize) -> Result<Self, BodyError> {
        let mut reader = serde_json::Deserializer::from_slice(bytes);
        let found = reader.deserialize_any(Whole { most_tokens })?;
        reader.end()?;
        let Fields {
            prompt,
            unknown,
            mut others,
        } = found.ok_or(BodyError::Kind)?;
        if !unknown.is_empty() {
            return Err(BodyError::Unknown(unknown.join(", ")));
        }
        let Some(Value::String(model)) = others.remove("model") else {
            return Err(BodyError::Model);
        };
        let prompt = match prompt.ok_or(BodyError::Prompt)? {
            Given::Text(text) => Prompt::Text(text),
            Given::Other => return Err(BodyError::Prompt),
            Given::List(list) if list.length > most_tokens => {
                return Err(BodyError::Length(most_tokens));
            }
            Given::List(list) if !list.is_whole => return Err(BodyError::Token),
            Given::List(list) => Prompt::Tokens(list.tokens),
        };
        Ok(Self {
            model,
            prompt,
            cache_salt: text(&mut others, "cache_salt")?,
            lora: adapter(others.remove("lora"))?,
            tenant: text(&mut others, "tenant")?,
        })
    }
}

fn text(fields: &mut Map<String, Value>, name: &'static str) -> Result<Option<String>, BodyError> {
    match fields.remove(name) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(_) => Err(BodyError::Text(name)),
    }
}

fn adapter(asked: Option<Value>) -> Result<Option<Adapter>, BodyError> {
    let mut fields = match asked {
        None | Some(Value::Null) => return Ok(None),
        Some(Value::String(name)) => return Ok(Some(Adapter::Named(name))),
        Some(Value::Object(fields)) if fields.len() == 3 => fields,
        Some(_) => return Err(BodyError::Adapter),
    };
    let names = ["name", "path", "digest"];
    if !names.iter().all(|&name| fields.contains_key(name)) {
        return Err(BodyError::Adapter);
    }
    let mut parts = [const { String::new() }; 3];
    for (part, name) in parts.iter_mut().zip(names) {
        *part = text(&mut fields, name)?.unwrap_or_default();
    }
    if parts.iter().any(String::is_empty) {
        return Err(BodyError::EmptyAdapter);
    }
    Ok(Some(Adapter::Given(parts)))
}

#[derive(Default)]
struct Fields {
    prompt: Option<Given>,
    unknown: Vec<String>,
    others: Map<String, Value>,
}

enum Given {
    Text(String),
    List(List),
    Other,
}

/// A list of what should be token ids. All of it is read, as it may be no JSON; no more of it is
/// kept than a prompt may have.
struct List {
    tokens: Vec<u32>,
    length: usize,
    is_whole: bool,
}

/// Reads any JSON: the fields of an object, and None for something else.
struct Whole {
    most_tokens: usize,
}

/// What is not wanted is read all the same: whether it is JSON comes first.
macro_rules! scalars {
    ($with:expr) => {
        fn visit_bool<E>(self, _: bool) -> Result<Self::Value, E> {
            Ok($with)
        }
        fn visit_i64<E>(self, _: i64) -> Result<Self::Value, E> {
            Ok($with)
        }
        fn visit_f64<E>(self, _: f64) -> Result<Self::Value, E> {
            Ok($with)
        }
        fn visit_unit<E>(self) -> Result<Self::Value, E> {
            Ok($with)
        }
    };
}

impl<'de> Visitor<'de> for Whole {
    type Value = Option<Fields>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("JSON")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut object: A) -> Result<Self::Value, A::Error> {
        let mut fields = Fields::default();
        while let Some(name) = object.next_key::<String>()? {
            match name.as_str() {
                "prompt" => {
                    fields.prompt = Some(object.next_value_seed(PromptSeed {
                        most: self.most_tokens,
                    })?);
                }
                "model" | "cache_salt" | "lora" | "tenant" => {
                    fields.others.insert(name, object.next_value()?);
                }
                _ => {
                    object.next_value::<IgnoredAny>()?;
                    fields.unknown.push(name);
                }
            }
        }
        fields.unknown.sort();
        fields.unknown.dedup();
        Ok(Some(fields))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
        while list.next_element::<IgnoredAny>()?.is_some() {}
        Ok(None)
    }

    fn visit_u64<E>(self, _: u64) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_str<E>(self, _: &str) -> Result<Self::Value, E> {
        Ok(None)
    }

    scalars!(None);
}

#[derive(Clone, Copy)]
struct PromptSeed {
    most: usize,
}

impl<'de> de::DeserializeSeed<'de> for PromptSeed {
    type Value = Given;

    fn deserialize<D: Deserializer<'de>>(self, reader: D) -> Result<Given, D::Error> {
        reader.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for PromptSeed {
    type Value = Given;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a prompt")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Given, A::Error> {
        let mut found = List {
            tokens: Vec::new(),
            length: 0,
            is_whole: true,
        };
        while let Some(token) = list.next_element_seed(TokenSeed)? {
            found.length += 1;
            match token {
                None => found.is_whole = false,
                Some(token) if found.length <= self.most => found.tokens.push(token),
                Some(_) => {}
            }
        }
        Ok(Given::List(found))
    }

    fn visit_str<E>(self, text: &str) -> Result<Given, E> {
        Ok(Given::Text(text.to_owned()))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut object: A) -> Result<Given, A::Error> {
        while object.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(Given::Other)
    }

    fn visit_u64<E>(self, _: u64) -> Result<Given, E> {
        Ok(Given::Other)
    }

    scalars!(Given::Other);
}

/// A token id; None for something else.
struct TokenSeed;

impl<'de> de::DeserializeSeed<'de> for TokenSeed {
    type Value = Option<u32>;

    fn deserialize<D: Deserializer<'de>>(self, reader: D) -> Result<Option<u32>, D::Error> {
        reader.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for TokenSeed {
    type Value = Option<u32>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a token id")
    }

    fn visit_u64<E>(self, number: u64) -> Result<Option<u32>, E> {
        Ok(u32::try_from(number).ok())
    }

    fn visit_str<E>(self, _: &str) -> Result<Option<u32>, E> {
        Ok(None)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Option<u32>, A::Error> {
        while list.next_element::<IgnoredAny>()?.is_some() {}
        Ok(None)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut object: A) -> Result<Option<u32>, A::Error> {
        while object.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(None)
    }

    scalars!(None);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

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
            lora: Some(Adapter::Given(["a", "b", "c"].map(str::to_owned))),
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
            assert!(error.contains("token ids"), "{wrong}: {error}");
        }
        let long = read(&json!({"model": "m", "prompt": [1, 2, 3, 4, 5, 6, 7, 8, 9]}));
        assert_eq!(long.unwrap_err(), "a prompt may have 8 tokens here");
    }

    proptest! {
        /// Whatever comes, it is read as JSON would be, or refused.
        #[test]
        fn foreign_bytes_are_no_harm(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let is_json = serde_json::from_slice::<Value>(&bytes).is_ok();
            let read = Body::read(&bytes, 8);
            prop_assert_eq!(matches!(read, Err(BodyError::Json(_))), !is_json);
        }

        #[test]
        fn json_of_any_shape_is_no_harm(text in "[\\[\\]{}:,0-9a-z\"\\\\.\\- ]{0,60}") {
            let body = format!("{{\"model\":\"m\",\"prompt\":[1,{text}]}}");
            let is_json = serde_json::from_slice::<Value>(body.as_bytes()).is_ok();
            let read = Body::read(body.as_bytes(), 8);
            prop_assert_eq!(matches!(read, Err(BodyError::Json(_))), !is_json);
        }
    }
}
