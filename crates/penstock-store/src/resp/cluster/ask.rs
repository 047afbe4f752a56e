//! Small questions to several nodes at once, by one thread.

use std::collections::BTreeSet;
use std::time::Instant;

use penstock_contract::Key;

use super::super::command::Commands;
use super::super::connection::{Exchange, Progress};
use super::super::failure::Failure;
use super::super::parser::Reply;
use super::super::pool::Lent;
use super::super::readiness::wait;
use super::topology::Node;
use crate::layers::circuit::{Pass, Verdict};

/// What one node is asked.
pub(super) struct Part<'t> {
    node: &'t Node,
    pass: Pass<'t>,
    commands: Commands,
    /// By reply: the request that it answers, or `None` if it answers an ASKING.
    answers: Vec<Option<usize>>,
}

impl<'t> Part<'t> {
    /// One command for the key of each request, with ASKING before it where a node wants that.
    pub(super) fn new(
        node: &'t Node,
        pass: Pass<'t>,
        command: &str,
        requests: &[usize],
        keys: &[Key],
        asking: &BTreeSet<usize>,
    ) -> Self {
        let mut commands = Commands::default();
        let mut answers = Vec::with_capacity(requests.len());
        for &index in requests {
            if asking.contains(&index) {
                commands.push(&["ASKING"]);
                answers.push(None);
            }
            commands.push_keys(command, std::slice::from_ref(&keys[index]));
            answers.push(Some(index));
        }
        Self {
            node,
            pass,
            commands,
            answers,
        }
    }

    /// Notes what the node's answers, or their absence, tell about the node.
    pub(super) fn conclude(self, verdict: Verdict) {
        self.pass.conclude(verdict);
    }
}

/// An answer: a request, and the number that came for it.
pub(super) type Answer = (usize, Result<u64, Failure>);

/// A part under way.
struct Talk<'p> {
    part: usize,
    connection: Lent<'p>,
    exchange: Exchange<'p>,
    /// The part may begin anew on a fresh connection.
    may_retry: bool,
}

/// The parts under way, and for each part what came of it so far.
struct Talks<'p> {
    parts: &'p [Part<'p>],
    under_way: Vec<Talk<'p>>,
    heard: Vec<Vec<Answer>>,
    failures: Vec<Option<Failure>>,
}

/// Asks all parts at once. Returns an answer for each request and, for each part, what it tells
/// about its node.
pub(super) fn ask_all(parts: &[Part<'_>], deadline: Instant) -> (Vec<Answer>, Vec<Verdict>) {
    let mut talks = Talks::begin(parts, deadline);
    while !talks.under_way.is_empty() {
        let moved = talks.step_each(deadline);
        if let Err(failure) = talks.rest(moved, deadline) {
            for talk in talks.under_way.drain(..) {
                talks.failures[talk.part] = Some(failure.clone());
            }
        }
    }
    talks.conclude()
}

impl<'p> Talks<'p> {
    fn begin(parts: &'p [Part<'p>], deadline: Instant) -> Self {
        let mut talks = Self {
            parts,
            under_way: Vec::new(),
            heard: parts.iter().map(|_| Vec::new()).collect(),
            failures: vec![None; parts.len()],
        };
        for (number, part) in parts.iter().enumerate() {
            // A node that takes long to connect to must leave time for the others' answers.
            let left = deadline.saturating_duration_since(Instant::now());
            let limit = Instant::now() + if parts.len() > 1 { left / 2 } else { left };
            talks.open(number, part.node.pool.lend(limit), true);
        }
        talks
    }

    fn open(&mut self, part: usize, lent: Result<Lent<'p>, Failure>, may_retry: bool) {
        match lent {
            Ok(connection) => self.under_way.push(Talk {
                part,
                connection,
                exchange: Exchange::new(&self.parts[part].commands),
                may_retry,
            }),
            Err(failure) => self.failures[part] = Some(failure),
        }
    }

    /// Moves each part on as far as it goes now; returns whether any moved.
    fn step_each(&mut self, deadline: Instant) -> bool {
        let mut moved = false;
        let mut at = 0;
        while at < self.under_way.len() {
            let talk = &mut self.under_way[at];
            let (part, heard) = (&self.parts[talk.part], &mut self.heard[talk.part]);
            let stepped = talk.exchange.step(&mut talk.connection, &mut |i, reply| {
                if let Some(index) = part.answers[i] {
                    heard.push((index, number(reply)));
                }
                Ok(())
            });
            moved |= !matches!(stepped, Ok(Progress::Waiting));
            match stepped {
                Ok(Progress::Waiting | Progress::Moved) => at += 1,
                Ok(Progress::Done) => drop(self.under_way.swap_remove(at)),
                Err(failure) => {
                    let talk = self.under_way.swap_remove(at);
                    self.broke(talk, failure, deadline);
                }
            }
        }
        moved
    }

    /// Begins a part anew if its connection had been closed while it lay idle.
    fn broke(&mut self, talk: Talk<'p>, failure: Failure, deadline: Instant) {
        let pool = &self.parts[talk.part].node.pool;
        let stale = talk.may_retry && talk.connection.was_stale(&failure);
        drop(talk.connection);
        let renewed = if stale {
            pool.lend_fresh(deadline)
        } else {
            pool.broke(&failure);
            Err(failure)
        };
        self.open(talk.part, renewed, false);
    }

    /// Waits until a part can be moved on, unless one just moved.
    fn rest(&self, moved: bool, deadline: Instant) -> Result<(), Failure> {
        if moved {
            return match Instant::now() >= deadline {
                true => Err(Failure::timed_out("reading the nodes' replies")),
                false => Ok(()),
            };
        }
        let mut polled: Vec<_> = self
            .under_way
            .iter()
            .map(|talk| talk.exchange.polled(&talk.connection))
            .collect();
        wait(&mut polled, deadline, "waiting for the nodes' replies")
    }

    /// A request that has not been answered has failed as its part has.
    fn conclude(self) -> (Vec<Answer>, Vec<Verdict>) {
        let mut answers: Vec<Answer> = Vec::new();
        let mut verdicts = vec![Verdict::Answered; self.parts.len()];
        let came = self.heard.into_iter().zip(self.failures);
        for ((part, verdict), (heard, failure)) in self.parts.iter().zip(&mut verdicts).zip(came) {
            let missing = part.answers.iter().flatten().skip(heard.len());
            if let Some(failure) = failure {
                *verdict = Verdict::of_failure(failure.kind);
                answers.extend(missing.map(|&index| (index, Err(failure.clone()))));
            }
            answers.extend(heard);
        }
        (answers, verdicts)
    }
}

fn number(reply: Reply) -> Result<u64, Failure> {
    match reply {
        Reply::Integer(number) => {
            u64::try_from(number).map_err(|_| Failure::protocol("a count below zero"))
        }
        Reply::Error(line) => Err(Failure::refused(&line)),
        _ => Err(Failure::protocol("the server sent a reply of another kind")),
    }
}
