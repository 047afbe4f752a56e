//! Small questions to several nodes at once, by one thread.

use std::collections::BTreeSet;
use std::time::Instant;

use super::super::command::Commands;
use super::super::connection::{Exchange, Progress};
use super::super::failure::Failure;
use super::super::parser::Reply;
use super::super::pool::Lent;
use super::super::socket::wait;
use super::topology::Node;
use crate::Key;
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

    /// Takes note of what the node's answers, or their absence, tell of it.
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
    /// It may begin anew on a fresh connection.
    may_retry: bool,
}

/// Asks all parts at once; returns an answer for each request, and by part what it tells of its node.
pub(super) fn ask_all(parts: &[Part<'_>], deadline: Instant) -> (Vec<Answer>, Vec<Verdict>) {
    let mut answers: Vec<Answer> = Vec::new();
    let mut verdicts = vec![Verdict::Answered; parts.len()];
    let mut talks: Vec<Talk<'_>> = Vec::new();
    let mut heard: Vec<Vec<Answer>> = parts.iter().map(|_| Vec::new()).collect();
    let mut failures: Vec<Option<Failure>> = vec![None; parts.len()];
    for (number, part) in parts.iter().enumerate() {
        // A node that takes long to connect to must leave time for the others' answers.
        let left = deadline.saturating_duration_since(Instant::now());
        let limit = Instant::now() + if parts.len() > 1 { left / 2 } else { left };
        match part.node.pool.lend(limit) {
            Ok(connection) => talks.push(Talk {
                part: number,
                connection,
                exchange: Exchange::new(&part.commands),
                may_retry: true,
            }),
            Err(failure) => failures[number] = Some(failure),
        }
    }
    while !talks.is_empty() {
        let mut moved = false;
        let mut at = 0;
        while at < talks.len() {
            let talk = &mut talks[at];
            let (part, heard) = (&parts[talk.part], &mut heard[talk.part]);
            let stepped = talk.exchange.step(&mut talk.connection, &mut |i, reply| {
                if let Some(index) = part.answers[i] {
                    heard.push((index, number(reply)));
                }
                Ok(())
            });
            match stepped {
                Ok(Progress::Waiting) => at += 1,
                Ok(Progress::Moved) => {
                    moved = true;
                    at += 1;
                }
                Ok(Progress::Done) => {
                    moved = true;
                    talks.swap_remove(at);
                }
                Err(failure) => {
                    moved = true;
                    let talk = talks.swap_remove(at);
                    let pool = &part.node.pool;
                    let stale = talk.may_retry && talk.connection.was_stale(&failure);
                    drop(talk.connection);
                    let renewed = if stale {
                        pool.lend_fresh(deadline)
                    } else {
                        pool.broke(&failure);
                        Err(failure)
                    };
                    match renewed {
                        Ok(connection) => talks.push(Talk {
                            part: talk.part,
                            connection,
                            exchange: Exchange::new(&part.commands),
                            may_retry: false,
                        }),
                        Err(failure) => failures[talk.part] = Some(failure),
                    }
                }
            }
        }
        let waited = if !moved {
            let mut polled: Vec<_> = talks
                .iter()
                .map(|talk| talk.exchange.polled(&talk.connection))
                .collect();
            wait(&mut polled, deadline, "waiting for the nodes' replies")
        } else if Instant::now() >= deadline {
            Err(Failure::timed_out("reading the nodes' replies"))
        } else {
            Ok(())
        };
        if let Err(failure) = waited {
            for talk in talks.drain(..) {
                failures[talk.part] = Some(failure.clone());
            }
        }
    }
    for (number, part) in parts.iter().enumerate() {
        let missing = part.answers.iter().flatten().skip(heard[number].len());
        if let Some(failure) = &failures[number] {
            verdicts[number] = Verdict::of_failure(failure.kind);
            answers.extend(missing.map(|&index| (index, Err(failure.clone()))));
        }
        answers.append(&mut heard[number]);
    }
    (answers, verdicts)
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
