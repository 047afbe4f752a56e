//! A request's queries to a pool that refuses some, or fails.

use penstock_catalogue::{
    Asker, Catalogue, CatalogueError, Group, Groups, LookupState, Query, Reads,
};
use penstock_contract::Chunk;

/// A pool that answers one query after another in these ways.
struct Pool {
    ways: Vec<Result<bool, CatalogueError>>,
    put: Vec<(u64, usize, Vec<Chunk>)>,
    cancelled: Vec<u64>,
}

impl Asker for Pool {
    type Error = CatalogueError;

    fn put(
        &mut self,
        query: &Query,
        chunks: impl ExactSizeIterator<Item = Chunk>,
    ) -> Result<bool, CatalogueError> {
        self.put.push((query.number, query.group, chunks.collect()));
        self.ways.remove(0)
    }

    fn cancel(&mut self, number: u64) {
        self.cancelled.push(number);
    }
}

#[test]
fn a_query_that_is_not_put_ends_the_look_up() {
    let group = |reads| Group {
        block_tokens: 16,
        reads,
    };
    let groups = vec![group(Reads::All), group(Reads::Window(32))];
    let mut catalogue = Catalogue::new(Groups::new(groups, 16).unwrap(), 100);
    let chunks: Vec<Chunk> = (1..5).map(|n| [n; 32]).collect();
    catalogue.add("a", 65, None).unwrap();
    catalogue.extend("a", &chunks).unwrap();
    let failure = CatalogueError::Config("the pool is closed");
    let mut ask = |ways: &[Result<bool, CatalogueError>]| {
        let mut pool = Pool {
            ways: ways.to_vec(),
            put: Vec::new(),
            cancelled: Vec::new(),
        };
        let asked = catalogue.ask_through("a", &mut pool);
        assert_eq!(pool.ways, []);
        (asked, pool, catalogue.lookup("a").unwrap())
    };
    let mut old = Vec::new();
    for (ways, expected) in [
        (vec![Ok(false)], Ok(None)),
        (vec![Ok(true), Ok(false)], Ok(None)),
        (vec![Err(failure.clone())], Err(failure.clone())),
        (vec![Ok(true), Err(failure.clone())], Err(failure.clone())),
    ] {
        let (asked, pool, state) = ask(&ways);
        assert_eq!((asked, state), (expected, LookupState::Over));
        let numbers: Vec<u64> = pool.put.iter().map(|put| put.0).collect();
        assert_eq!(pool.cancelled, numbers[..numbers.len() - 1]);
        old.extend(numbers);
    }
    let (asked, pool, state) = ask(&[Ok(true), Ok(true)]);
    assert_eq!((asked, state), (Ok(Some(8)), LookupState::Asked));
    assert_eq!(pool.cancelled, []);
    let put: Vec<_> = pool.put.iter().map(|put| (put.1, put.2.clone())).collect();
    assert_eq!(put, [(0, chunks.clone()), (1, chunks)]);
    // Answers to earlier look-ups say nothing of this one.
    for number in old {
        assert_eq!(catalogue.answer(number, Some(&[true; 4])), 0);
    }
    assert_eq!(catalogue.lookup("a"), Ok(LookupState::Asked));
}
