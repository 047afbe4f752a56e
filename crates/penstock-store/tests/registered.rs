//! Stores that others bring: which schemes are theirs, and what is said if one does not open. What
//! programs do once they are open is tested from Python, which is what they are written in.

use penstock_store::{OpenOptions, Place, Registered, open, unknown_schemes};

fn options(place: Place) -> OpenOptions {
    let registered = Registered {
        scheme: "troubled".to_owned(),
        origin: "a test 1.0".to_owned(),
        place,
    };
    OpenOptions {
        registered: vec![registered],
        ..OpenOptions::default()
    }
}

#[test]
fn a_program_that_does_not_open_is_refused_in_words() {
    let said = |place| {
        let url = "troubled://me:secret@x?trouble=opening";
        let Err(error) = open(url, &options(place)) else {
            panic!("it opened");
        };
        let said = error.to_string();
        assert!(
            said.contains("a test 1.0") && !said.contains("secret"),
            "{said}"
        );
        said
    };
    assert!(said(Place::Nowhere("two bring it".into())).contains("two bring it"));
    assert!(said(Place::Program(vec!["/nowhere/program".into()])).contains("does not start"));
    assert!(said(Place::Program(vec!["true".into()])).contains("before it greeted"));
}

#[test]
fn schemes_that_are_not_ours_are_known_or_not() {
    assert_eq!(
        unknown_schemes("memory://?size=1MiB troubled://x valkey+cluster://y"),
        ["troubled"]
    );
    let Err(error) = open("other://x", &options(Place::Nowhere(String::new()))) else {
        panic!("it opened");
    };
    let said = error.to_string();
    assert!(
        said.contains("other://") && said.contains("troubled:// (a test 1.0)"),
        "{said}"
    );
    // Nobody can bring what is built in.
    let mut options = options(Place::Nowhere("taken".into()));
    options.registered[0].scheme = "memory".to_owned();
    assert!(open("memory://?size=1MiB", &options).is_ok());
}
