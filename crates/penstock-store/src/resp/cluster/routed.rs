//! A batch on its way through a cluster: what each request met, and where it is sent next.

use std::io::{IoSlice, IoSliceMut};

use super::super::failure::{Failure, Redirect};
use super::super::pipeline::{Answer, Batch};
use crate::layers::circuit::Verdict;

/// A batch whose requests may be redirected. Redirected requests have no outcome yet.
pub(super) struct Routed<'b, B> {
    inner: &'b mut B,
    /// By request: whether ASKING precedes it.
    asks: Vec<bool>,
    /// By request: what it said about the node that it was sent to.
    verdicts: Vec<Verdict>,
    redirected: Vec<(usize, Redirect)>,
}

impl<'b, B: Batch> Routed<'b, B> {
    pub(super) fn new(inner: &'b mut B, count: usize) -> Self {
        Self {
            inner,
            asks: vec![false; count],
            verdicts: vec![Verdict::Nothing; count],
            redirected: Vec::new(),
        }
    }

    /// What these requests, all sent to one node, said about it. One answered request is enough for
    /// an answer.
    pub(super) fn verdict(&self, requests: &[usize]) -> Verdict {
        Verdict::all(requests.iter().map(|&index| self.verdicts[index]))
    }

    /// The requests to be sent on, and where to. Notes which of them ASKING has to precede.
    pub(super) fn take_redirected(&mut self) -> Vec<(usize, Redirect)> {
        let redirected = std::mem::take(&mut self.redirected);
        for (index, redirect) in &redirected {
            self.asks[*index] = redirect.is_ask;
        }
        redirected
    }

    /// Ends requests that were not sent.
    pub(super) fn refuse(&mut self, requests: impl IntoIterator<Item = usize>, failure: &Failure) {
        requests
            .into_iter()
            .for_each(|index| self.inner.finish(index, Err(failure.clone())));
    }
}

impl<B: Batch> Batch for Routed<'_, B> {
    fn encode(&self, index: usize, text: &mut Vec<u8>) {
        if self.asks[index] {
            super::super::command::asking(text);
        }
        self.inner.encode(index, text);
    }

    fn has_prelude(&self, index: usize) -> bool {
        self.asks[index]
    }

    fn carries(&self, index: usize) -> Option<&[IoSlice<'_>]> {
        self.inner.carries(index)
    }

    fn capacity(&self, index: usize) -> Option<u64> {
        self.inner.capacity(index)
    }

    fn destination(&mut self, index: usize, from: u64, most: u64) -> Vec<IoSliceMut<'_>> {
        self.inner.destination(index, from, most)
    }

    fn weight(&self, index: usize) -> u64 {
        self.inner.weight(index)
    }

    fn finish(&mut self, index: usize, outcome: Result<Answer, Failure>) {
        self.verdicts[index] = match &outcome {
            Ok(_) => Verdict::Answered,
            Err(failure) => Verdict::of_failure(failure.kind),
        };
        match outcome {
            Err(Failure {
                redirect: Some(redirect),
                ..
            }) => self.redirected.push((index, *redirect)),
            outcome => self.inner.finish(index, outcome),
        }
    }
}
