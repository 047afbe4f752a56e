//! Commands as the server reads them: arrays of strings.

use penstock_contract::Key;

/// A pipeline of whole commands.
#[derive(Debug, Default)]
pub(super) struct Commands {
    text: Vec<u8>,
    count: usize,
}

impl Commands {
    pub(super) fn push(&mut self, arguments: &[&str]) {
        array(&mut self.text, arguments.len());
        arguments
            .iter()
            .for_each(|argument| string(&mut self.text, argument.as_bytes()));
        self.count += 1;
    }

    /// A command whose arguments are keys.
    pub(super) fn push_keys(&mut self, name: &str, keys: &[Key]) {
        array(&mut self.text, 1 + keys.len());
        string(&mut self.text, name.as_bytes());
        let mut form = Vec::new();
        keys.iter()
            .for_each(|key| string(&mut self.text, key_form(key, &mut form)));
        self.count += 1;
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.text
    }

    /// How many replies these commands ask for.
    pub(super) fn count(&self) -> usize {
        self.count
    }
}

/// Appends a whole ASKING.
pub(super) fn asking(text: &mut Vec<u8>) {
    array(text, 1);
    string(text, b"ASKING");
}

/// Appends a whole GET.
pub(super) fn get(text: &mut Vec<u8>, key: &Key) {
    array(text, 2);
    string(text, b"GET");
    string(text, key_form(key, &mut Vec::new()));
}

/// Appends a SET up to its value. The value and a CR LF are to follow.
pub(super) fn set(text: &mut Vec<u8>, key: &Key, value_bytes: u64) {
    array(text, 3);
    string(text, b"SET");
    string(text, key_form(key, &mut Vec::new()));
    head(text, b'$', value_bytes);
}

fn key_form<'f>(key: &Key, form: &'f mut Vec<u8>) -> &'f [u8] {
    form.clear();
    key.append_text(form);
    form
}

fn array(text: &mut Vec<u8>, elements: usize) {
    head(text, b'*', elements as u64);
}

fn string(text: &mut Vec<u8>, bytes: &[u8]) {
    head(text, b'$', bytes.len() as u64);
    text.extend_from_slice(bytes);
    text.extend_from_slice(b"\r\n");
}

fn head(text: &mut Vec<u8>, kind: u8, number: u64) {
    text.push(kind);
    text.extend_from_slice(itoa::Buffer::new().format(number).as_bytes());
    text.extend_from_slice(b"\r\n");
}
